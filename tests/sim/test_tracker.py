"""The instrument itself, tested by allocating known bytes."""

import torch

from streambp.sim.tracker import WORKSPACES, LiveTracker, register_model


def test_views_count_once_and_storages_leave_when_they_die():
    tracker = LiveTracker()
    with tracker:
        x = torch.zeros(10, 10)
        y = x[2:].t()
        assert tracker.live_bytes == 400
        del x
        assert tracker.live_bytes == 400
        del y
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 400


def test_sizes_round_up_to_the_allocators_granularity():
    tracker = LiveTracker(round_to=512)
    with tracker:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert tracker.live_bytes == 512 + 1024
    del kept


def test_categories_sum_to_the_peak_and_name_what_was_alive_then():
    model = torch.nn.Linear(100, 200, bias=False)
    tracker = LiveTracker()
    with tracker, register_model(tracker, model):
        x = torch.randn(30, 100)
        tracker.register(x, "inputs", "x")
        tracker.phase = "forward"
        loss = model(x).sum()
        tracker.phase = "backward"
        loss.backward()
    assert sum(tracker.peak_by_category.values()) == tracker.peak_bytes
    assert tracker.peak_by_category["weights"] == 80_000
    assert tracker.peak_by_category["inputs"] == 12_000
    assert tracker.peak_largest[0].name == "weight"
    assert tracker.peak_largest[0].shape == (200, 100)
    assert tracker.live_by_category()["gradients"] == 80_000
    assert set(tracker.peaks) == {"start", "forward", "backward"}


def test_peak_by_category_is_of_the_peak_not_of_the_end():
    tracker = LiveTracker()
    with tracker:
        a = torch.zeros(1000)
        tracker.register(a, "first")
        del a
        b = torch.zeros(10)
        tracker.register(b, "second")
    assert tracker.peak_by_category == {"first": 4000}
    tracker.reset_peak()
    assert tracker.peak_bytes == 40
    assert tracker.peak_by_category == {"second": 40}


def test_workspaces_count_only_during_their_op():
    def twice_the_output(args, kwargs, out):
        return 2 * out.nbytes

    tracker = LiveTracker(workspaces={torch.ops.aten.mm.default: twice_the_output})
    x = torch.zeros(10, 10)
    with tracker:
        tracker.register(x, "inputs")
        y = x @ x
    assert tracker.live_bytes == 800
    assert tracker.peak_bytes == 1600
    assert tracker.peak_by_category[WORKSPACES] == 800
    assert tracker.peak_op == "mm.default"
    del y


def test_a_storage_resized_in_place_is_counted_at_its_new_size():
    tracker = LiveTracker()
    with tracker:
        x = torch.zeros(10)
        x.resize_(100)
        assert tracker.live_bytes == 400


def test_events_and_timeline_follow_every_change():
    tracker = LiveTracker(record_events=True, timeline=True)
    with tracker:
        x = torch.zeros(10)
        y = torch.zeros(20)
        del x, y
    assert [event.num_bytes for event in tracker.events] == [40, 80, -40, -80]
    points = tracker.timeline.to_dict()
    assert points["live_bytes"] == [40, 120, 80, 0]
    assert max(tracker.timeline.to_dict(max_points=2)["live_bytes"]) == 120
