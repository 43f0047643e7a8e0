"""From a seed: a world, and pending pods whose constraints bite in it."""

from dataclasses import dataclass

from tests.cluster.differential.constraints import CONSTRAINTS
from tests.cluster.differential.draw import POD_LABELS, Draw, labels
from tests.cluster.differential.objects import GPU_MEMORY, SCHEDULER_NAME, Json, Objects, name_of
from tests.cluster.differential.worlds import world

# The pod without any constraint: what it may have is what the nodes allow by themselves.
PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Case:
    """A pending pod and the kinds of its constraints, which are keys of CONSTRAINTS."""

    manifest: Json
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """A world and the pods to be judged in it. Their names are unique in it."""

    world: Objects
    cases: dict[str, Case]


def generate(seed: int, *, cases: int) -> Generated:
    """The same for the same seed. One of the cases is PLAIN."""
    draw = Draw(seed)
    made = world(draw, seed)
    plain = Case(_pod(draw, PLAIN, made), ())
    others = [_case(draw, f"p{number:03}", made) for number in range(cases - 1)]
    return Generated(made, {name_of(case.manifest): case for case in (plain, *others)})


def _case(draw: Draw, name: str, made: Objects) -> Case:
    pod = _pod(draw, name, made)
    wanted = draw.weighted({1: 9, 2: 7, 3: 4})
    drawn = {
        draw.weighted({kind: weight for kind, (_, weight) in CONSTRAINTS.items()}) for _ in range(wanted)
    }
    kinds = tuple(kind for kind in CONSTRAINTS if kind in drawn)
    for kind in kinds:
        CONSTRAINTS[kind][0](draw, pod, made)
    return Case(pod, kinds)


def _pod(draw: Draw, name: str, made: Objects) -> Json:
    container = {"name": "main", "image": "any", "resources": {"limits": {GPU_MEMORY: "1Mi"}}}
    return {
        "metadata": {
            "name": name,
            "namespace": name_of(draw.choice(made.namespaces)),
            "labels": labels(draw, POD_LABELS, 0.7),
        },
        "spec": {"schedulerName": SCHEDULER_NAME, "containers": [container]},
    }
