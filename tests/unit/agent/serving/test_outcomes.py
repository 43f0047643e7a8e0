"""A load and its failure are counted."""

from berth.triton.errors import TritonRefused
from tests.fakes.agent_node import Node


async def test_a_load_and_its_failure_are_counted_with_their_time_and_kind(on_node: Node) -> None:
    model = await on_node.stage()
    on_node.triton.errors = [TritonRefused("CUDA out of memory")]
    await on_node.lifecycle.start_load(model)
    count = on_node.registry.get_sample_value
    assert count("berth_agent_load_failures_total", {"kind": "capacity"}) == 1
    assert count("berth_agent_load_seconds_count") == 0
    await on_node.lifecycle.start_load(model)
    assert count("berth_agent_load_seconds_count") == 1
    assert 0.01 <= (count("berth_agent_load_seconds_sum") or 0) < 5
    await on_node.lifecycle.start_load(model)  # it serves already: nothing is told again
    assert [reason for reason, _ in on_node.events.said] == ["ModelLoadFailed", "ModelLoaded"]
