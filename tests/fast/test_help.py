"""--help of every command: quick and complete, and the command `cxda`, which leads to all of them."""

from cxda_jax.config.reading import table
from tests.commands import command


def test_the_fields_of_configs_are_listed():
    assert command("train", "--help_config") == table() + "\n"
