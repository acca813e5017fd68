"""What docs/study/devices.py asks of devices, and how it counts."""

import numpy as np

from docs.study import devices

RNG = np.random.default_rng(0)
DATA = {
    "labels": RNG.choice(4, 6 * 200, p=[0.7, 0.2, 0.08, 0.02]).astype(np.int32),
    "domain": np.repeat(np.arange(6), 200),
}


def test_each_new_device_is_asked_as_often_and_has_its_part_of_a_mixed_buffer():
    new, owner = np.array([0, 1, 2, 4, 5]), DATA["domain"]
    for number, part in ((1, 100), (5, 20)):
        plan = devices.plans_of(DATA, new, number, "natural", 1.0, 0)
        assert (owner[plan.query] == np.repeat(new, devices.EACH)[:, None]).all()
        assert ((owner[plan.support] == owner[plan.query[:, :1]]).sum(1) == part).all()
        assert not (plan.support[:, :, None] == plan.query[:, None]).any() and 3 not in owner[plan.support]
        assert (np.diff(np.sort(plan.support, 1)) > 0).all()


def test_devices_count_alike_and_a_rare_class_is_recalled_by_its_own_queries():
    kind = devices.named(*devices.KINDS[0])
    rare, owner = np.zeros((20, 20), bool), np.repeat([0, 1], 10)
    rare[0, :4] = rare[15, :2] = True
    right = {devices.PLAIN: np.zeros((20, 20), bool), devices.OURS: ~rare}
    right[devices.OURS][0, 0] = True  # one of four rare queries of device 0, none of two of device 1
    data = {"labels": np.array([0, 0, 1, 1, 0, 0, 0, 0]), "domain": np.repeat([0, 1], 4)}
    found = devices.summary(data, [({kind: (owner, right, rare)}, {"seed": 0})])
    row = found["table"][kind][devices.OURS]
    assert row["rare queries"] == 6 and row["rare"] == 12.5 and row["rare gain"][0] == 12.5
    np.testing.assert_allclose(row["gain"][0], 100 * (197 / 200 + 198 / 200) / 2, atol=0.01)
    np.testing.assert_allclose([p["classes"] for p in found["points"]], [2 / 1.7548, 1 / 1.7548], atol=1e-3)
    assert [p[devices.OURS] for p in found["points"]] == [98.5, 99.0]
