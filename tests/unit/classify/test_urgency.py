import pytest

from app.classify.urgency import declared
from app.contracts.request import Declaration, Source, Urgency
from app.errors import MalformedRequest

U = Urgency


@pytest.mark.parametrize(
    ("tier", "header", "urgency", "source"),
    [
        pytest.param(None, None, U.UNDECLARED, Source.NONE, id="nothing"),
        pytest.param("auto", None, U.UNDECLARED, Source.NONE, id="auto"),
        pytest.param("default", None, U.UNDECLARED, Source.BODY, id="default"),
        pytest.param("priority", None, U.URGENT, Source.BODY, id="priority"),
        pytest.param("flex", None, U.DEFERRABLE, Source.BODY, id="flex"),
        pytest.param(None, "urgent", U.URGENT, Source.HEADER, id="header_alone"),
        pytest.param("auto", "Deferrable ", U.DEFERRABLE, Source.HEADER, id="auto_and_header"),
        pytest.param("flex", "urgent", U.DEFERRABLE, Source.BODY, id="body_wins"),
        pytest.param("default", "urgent", U.UNDECLARED, Source.BODY, id="default_wins"),
    ],
)
def test_the_body_wins_over_the_header(
    tier: str | None, header: str | None, urgency: Urgency, source: Source
) -> None:
    assert declared(tier, header) == Declaration(urgency, source)


@pytest.mark.parametrize(
    ("tier", "header"), [("bogus", None), (5, None), (["flex"], None), ("", None), ("flex", "soon")]
)
def test_anything_else_is_refused(tier: object, header: str | None) -> None:
    with pytest.raises(MalformedRequest, match="must be one of"):
        declared(tier, header)
