"""What the README says runs."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", README, re.S))
def test_python_blocks_run(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_links_lead_somewhere():
    root = Path(__file__).parent.parent
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    assert links and all((root / link).exists() for link in links)
