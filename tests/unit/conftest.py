from tests.fakes.children import _noting, no_child_is_left

__all__ = ["_noting", "no_child_is_left"]
