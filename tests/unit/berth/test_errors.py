"""What the API server refuses."""

from berth.kube.errors import Conflict, NotFound, response_error


def test_statuses_become_the_errors_that_somebody_handles() -> None:
    assert isinstance(response_error(404, "NotFound", "x"), NotFound)
    assert isinstance(response_error(409, "Conflict", "x"), Conflict)
    assert str(response_error(500, "", "boom")) == "500: boom"
