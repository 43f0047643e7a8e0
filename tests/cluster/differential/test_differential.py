"""The binder's filters against the real kube-scheduler: the same nodes for the same pods in the same worlds.

The binder judges the objects as the API server gives them, with all defaults. A failure names the seed;
`-k 'seed7]'` repeats it.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio

from berth.contract.keys import Keys
from localcluster.binaries import control_plane_directory
from tests.cluster.differential.constraints import CONSTRAINTS, UNUSABLE_CLAIM, WAITING_CLAIM
from tests.cluster.differential.generator import PLAIN, Case, Generated, generate
from tests.cluster.differential.objects import GPU_MEMORY, SCHEDULER_NAME, Json, Objects, name_of
from tests.cluster.differential.reference import Judged, Reference, running
from tests.cluster.differential.vanished import Answers, answers, vanished

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEYS = Keys()
SEEDS = range(1, 31)
CASES = 120
# Of the answers of a seed, so many must be neither no node nor what any pod may have.
TELLING_SHARE = 0.2
# Over all seeds, for each kind of constraint.
LEAST_CASES, LEAST_TELLING = 70, 70
_SHOWN = 5


@dataclass
class Tally:
    """What the seeds that ran have shown."""

    seeds: set[int] = field(default_factory=set)
    telling: Counter[str] = field(default_factory=Counter)


@pytest.fixture(scope="module")
def tally() -> Tally:
    return Tally()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference() -> AsyncIterator[Reference]:
    binaries = await asyncio.to_thread(control_plane_directory)
    async with running(binaries) as scheduler:
        yield scheduler


def ours(judged: Judged) -> Answers:
    """The nodes that the binder's filters leave, by pod; it has seen others that are gone."""
    return answers(judged.world, judged.pods, KEYS, gone=vanished(judged.world.nodes[::3]))


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"seed{seed}")
async def test_the_binder_allows_what_kube_scheduler_allows(
    reference: Reference, tally: Tally, seed: int
) -> None:
    generated = generate(seed, cases=CASES)
    judged = await reference.feasible(generated.world, [case.manifest for case in generated.cases.values()])
    telling = [name for name in generated.cases if is_telling(judged.feasible, name)]
    tally.seeds.add(seed)
    tally.telling.update(kind for name in telling for kind in generated.cases[name].kinds)
    assert len(telling) >= TELLING_SHARE * CASES
    own = ours(judged)
    wanted = {name: expected(case, judged.feasible[name]) for name, case in generated.cases.items()}
    different = [name for name in generated.cases if own[name] != wanted[name]]
    assert not different, difference(generated, judged, own, different, seed=seed)


def expected(case: Case, theirs: frozenset[str]) -> frozenset[str]:
    """What the binder should allow: it binds no volumes, so it refuses what needs that (binder/cache/volumes.py)."""
    return frozenset() if WAITING_CLAIM in case.kinds else theirs


def is_telling(answers: Answers, name: str) -> bool:
    """Whether the pod's constraints left some nodes but not all that are open to any pod."""
    return answers[name] not in (frozenset(), answers[PLAIN])


def difference(generated: Generated, judged: Judged, own: Answers, names: list[str], *, seed: int) -> str:
    lines = [f"seed {seed}: {len(names)} of {CASES} pods differ"]
    kinds = Counter(kind for name in names for kind in generated.cases[name].kinds)
    lines.append(f"their constraints: {dict(kinds.most_common())}")
    for name in names[:_SHOWN]:
        theirs, pod = judged.feasible[name], judged.pods[name]
        metadata = {key: pod["metadata"].get(key) for key in ("namespace", "labels")}
        lines += [
            f"{name} ({', '.join(generated.cases[name].kinds)})",
            f"  only kube-scheduler allows {sorted(theirs - own[name])}",
            f"  only the binder allows {sorted(own[name] - theirs)}",
            f"  {json.dumps({**metadata, 'spec': pod['spec']}, separators=(',', ':'))}",
        ]
    return "\n".join(lines)


async def test_every_kind_of_constraint_has_decided_something(tally: Tally) -> None:
    if tally.seeds != set(SEEDS):
        pytest.skip("says something only of all seeds together")
    few = {kind: tally.telling[kind] for kind in CONSTRAINTS if tally.telling[kind] < LEAST_TELLING}
    assert few == {UNUSABLE_CLAIM: 0}  # it leaves no node


async def test_the_generator_repeats_itself_and_draws_every_kind_often() -> None:
    counts: Counter[str] = Counter()
    for seed in SEEDS:
        counts.update(kind for case in generate(seed, cases=CASES).cases.values() for kind in case.kinds)
    assert {kind: counts[kind] for kind in CONSTRAINTS if counts[kind] < LEAST_CASES} == {}
    assert generate(7, cases=CASES) == generate(7, cases=CASES)


def node(name: str, *, taint: Json | None = None, **labels: str) -> Json:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **labels}},
        "spec": {"taints": [taint] if taint else []},
        "status": {"allocatable": {"cpu": "1", "memory": "1Gi", "pods": "10"}},
    }


def namespace(name: str, **labels: str) -> Json:
    return {"metadata": {"name": name, "labels": {"world": "by-hand", **labels}}}


def bound(name: str, *, to: str, in_namespace: str = "red", **labels: str) -> Json:
    return {
        "metadata": {"name": name, "namespace": in_namespace, "labels": labels},
        "spec": {"nodeName": to, "containers": [{"name": "main", "image": "any"}]},
    }


def pending(name: str, **spec: object) -> Json:
    container = {"name": "main", "image": "any", "resources": {"limits": {GPU_MEMORY: "1Mi"}}}
    return {
        "metadata": {"name": name, "namespace": "red", "labels": {"app": "web"}},
        "spec": {"schedulerName": SCHEDULER_NAME, "containers": [container], **spec},
    }


def near(**term: object) -> Json:
    terms = [{"topologyKey": "kubernetes.io/hostname", "labelSelector": {}, **term}]
    return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


DEDICATED = {"key": "dedicated", "value": "a", "effect": "NoSchedule"}
BY_HAND = Objects(
    nodes=[node("n1", zone="east"), node("n2", zone="west"), node("n3", zone="west", taint=DEDICATED)],
    namespaces=[namespace("red", team="red"), namespace("blank")],
    pods=[bound("in-red", to="n1"), bound("in-blank", to="n2", in_namespace="blank")],
)


async def test_the_answers_are_kube_schedulers_and_read_right(reference: Reference) -> None:
    """Worked out by hand: a harness that loses a node, or a pod, would agree with a binder that does."""
    tolerant = {"tolerations": [{"key": "dedicated", "operator": "Exists"}]}
    expected: dict[str, tuple[Json, set[str]]] = {
        "plain": ({}, {"n1", "n2"}),
        "selects": ({"nodeSelector": {"zone": "west"}}, {"n2"}),
        "tolerates": (tolerant, {"n1", "n2", "n3"}),
        "selects-and-tolerates": ({"nodeSelector": {"zone": "west"}, **tolerant}, {"n2", "n3"}),
        "tolerates-another": ({"tolerations": [{**DEDICATED, "value": "b"}]}, {"n1", "n2"}),
        "wants-nowhere": ({"nodeSelector": {"zone": "north"}}, set()),
        "follows": ({"affinity": near()}, {"n1"}),
        "follows-all": ({"affinity": near(namespaceSelector={})}, {"n1", "n2"}),
        "asks-too-much": ({"resources": {"requests": {"cpu": "1001m"}}}, set()),
    }
    judged = await reference.feasible(
        BY_HAND, [pending(name, **spec) for name, (spec, _) in expected.items()]
    )
    assert {name: set(nodes) for name, nodes in judged.feasible.items()} == {
        name: nodes for name, (_, nodes) in expected.items()
    }
    assert {name_of(pod) for pod in judged.world.pods} == {"in-red", "in-blank", "canary"}


async def test_the_known_defect_is_still_there(reference: Reference) -> None:
    """kube-scheduler 1.36 reads some namespace selectors of a pod's own terms as "every namespace".

    mergeAffinityTermNamespacesIfNotEmpty takes the term by value, so that its "and now select nothing" is
    lost (interpodaffinity/plugin.go), and the selector is then held against a namespace without labels.
    Whatever matches that, as DoesNotExist and NotIn do, matches the pods of all namespaces. The generator
    leaves these selectors out; once this test fails it can draw them (constraints._SAFE_OPERATORS).
    """
    teamless = {"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}
    judged = await reference.feasible(BY_HAND, [pending("p", affinity=near(namespaceSelector=teamless))])
    documented = {"n2"}
    assert judged.feasible["p"] == documented | {"n1"}
