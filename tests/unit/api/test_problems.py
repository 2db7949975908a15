import json

import pytest

from app import errors
from app.api import problems


def leaves(kind: type[Exception]) -> list[type[Exception]]:
    children = kind.__subclasses__()
    return [leaf for child in children for leaf in leaves(child)] if children else [kind]


@pytest.mark.parametrize("family", [errors.RequestRefused, errors.Overloaded, errors.ServiceFailed])
def test_every_failure_that_a_client_can_meet_has_a_row(family: type[Exception]) -> None:
    assert set(leaves(family)) <= set(problems.PROBLEMS)


def test_a_problem_stays_small_whatever_was_sent() -> None:
    error = errors.MalformedRequest("x" * 10**6, param="y" * 10**6)
    body = problems.body_of(error)
    assert len(body) < 4096
    assert json.loads(body)["error"]["code"] == "invalid_request"


def test_an_engines_large_error_is_cut_down() -> None:
    content = {"message": "é" * 10**6, "type": "BadRequestError", "param": None, "code": 400}
    body = problems.bounded(json.dumps({"error": content}).encode())
    assert len(body) < 4096
    assert json.loads(body)["error"]["type"] == "BadRequestError"


def test_an_engines_large_error_of_no_known_form_is_replaced() -> None:
    assert json.loads(problems.bounded(b"<" * 10**5))["error"]["code"] == "invalid_request"


def test_only_failures_to_be_tried_again_carry_retry_after() -> None:
    assert problems.headers_of(errors.PoolBusy("m", "latency", 7)) == {
        "x-pool": "latency",
        "retry-after": "7",
    }
    assert problems.headers_of(errors.MalformedRequest("m")) == {}
