"""Which pods bring the same files: by their controller and its template, or by the model's id of a pod on its own."""

from typing import Any

import pytest

from binder.pod.template import Template, family_of, template_of

HASH = {"pod-template-hash": "x"}


@pytest.mark.parametrize(
    ("owner", "labels", "model_id", "template"),
    [
        ("rs", HASH, "m", ("team", "rs", "x")),
        ("set", {"controller-revision-hash": "v2"}, None, ("team", "set", "v2")),
        ("rs", {}, None, ("team", "rs", "")),
        (None, HASH, "m", ("team", "", "m")),
        (None, HASH, None, None),
    ],
    ids=["of a ReplicaSet", "a revision of one controller", "without a hash", "on its own", "without an id"],
)
def test_the_template_of_a_pod(
    owner: str | None, labels: dict[str, str], model_id: str | None, template: Template | None
) -> None:
    assert template_of("team", owner, labels, model_id) == template


@pytest.mark.parametrize(
    ("owners", "family"),
    [
        ([{"kind": "ReplicaSet", "name": "web-x", "controller": True}], "ReplicaSet/web"),
        ([{"kind": "StatefulSet", "name": "web", "controller": True}], "StatefulSet/web"),
        ([{"kind": "ReplicaSet", "name": "web-x"}], ""),
        ([], ""),
    ],
    ids=["of a Deployment", "a controller of its own", "an owner that is no controller", "on its own"],
)
def test_the_family_of_a_pod(owners: list[dict[str, Any]], family: str) -> None:
    assert family_of({"metadata": {"ownerReferences": owners, "labels": HASH}}) == family
