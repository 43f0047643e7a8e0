"""`berth upgrade-node NODE`: replace the out-of-date pods of Berth on one node, after its models have moved."""

import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from berth.contract.keys import agent_lease_name, agent_lease_namespace
from berth.contract.pod import PodRef
from berth.kube import paths
from berth.kube.client import KubeClient, open_client
from berth.kube.command import OutputOptions, console, object_name, plain
from berth.kube.errors import Conflict, KubeError, NotFound, may_pass
from berth.runtime import options as opt
from berth.runtime.errors import CannotStart, Failed
from berth.runtime.process import run_process
from binder.cli.upgrade_plan import (
    AGENT,
    SERVER,
    Action,
    Cordon,
    Evict,
    Observed,
    Replace,
    Uncordon,
    Upgrade,
    pods_of,
)
from binder.loop.pod_writes import evict

SUMMARY = """Replace the pods of berth-server and berth-agent on one node that are not of their DaemonSets' last
revision; the DaemonSets themselves replace none (updateStrategy OnDelete). A new Triton loads all models anew, so
first the node is cordoned and its model pods are evicted, as their PodDisruptionBudgets allow; their controllers make
others elsewhere. Then the old pods are deleted, and when the new ones, Triton and the models that are on the node
are ready, the node is uncordoned, unless it was cordoned before. A pod that no controller would make anew is not
evicted: its model is loaded again here. Do one node after another; run it again to go on where it was stopped."""
_LINE = 4000
_PAUSE_SECONDS = 2.0
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class UpgradeOptions(OutputOptions):
    """Which node, and how."""

    node: str = opt.positional("the node's name", metavar="NODE", parse=object_name)
    agent_only: bool = opt.switch(
        "replace the agent alone: nothing is cordoned or evicted, and models go on serving", default=False
    )
    timeout: float = opt.seconds("the longest that all of it may take", default=1800.0, minimum=1.0)


def run(argv: Sequence[str]) -> int:
    """Entry point of `berth upgrade-node`."""
    return run_process("upgrade-node", SUMMARY, UpgradeOptions, main, argv)


async def main(options: UpgradeOptions, stop: asyncio.Event) -> None:
    json_wanted = options.output == "json"
    say = _to_stderr if json_wanted else _to_stdout
    async with open_client(options.kubeconfig) as client:
        upgrade = NodeUpgrade(client, options, say=say, pause_seconds=_PAUSE_SECONDS)
        try:
            await upgrade.run(stop)
        finally:
            if json_wanted and upgrade.begun:
                print(json.dumps(upgrade.record.to_json(), indent=2))


def _to_stdout(line: str) -> None:
    console().print(plain(line, limit=_LINE))


def _to_stderr(line: str) -> None:
    print(plain(line, limit=_LINE), file=sys.stderr, flush=True)


@dataclass(slots=True)
class Record:
    """What has been done so far, for the next run."""

    node: str
    mark: str  # the annotation of a node that an upgrade has cordoned
    done: bool = False
    cordoned: bool = False
    evicted: list[str] = field(default_factory=list)
    stayed: list[str] = field(default_factory=list)
    replaced: list[str] = field(default_factory=list)
    waiting: tuple[str, ...] = ()

    def to_json(self) -> Json:
        return {
            "node": self.node,
            "done": self.done,
            "cordoned": self.cordoned,
            "evicted": self.evicted,
            "stayed": self.stayed,
            "replaced": self.replaced,
            "waitingFor": list(self.waiting),
        }

    def left(self) -> str:
        """What a failure leaves."""
        done = [
            f"{word} {', '.join(names)}"
            for word, names in (("evicted", self.evicted), ("deleted", self.replaced))
            if names
        ]
        so_far = f" So far: {'; '.join(done)}." if done else ""
        if not self.cordoned:
            return f"{so_far} Run it again to go on."
        return (
            f"{so_far} {self.node} stays cordoned: run it again to go on, or give up with kubectl uncordon "
            f"{self.node} and kubectl annotate node {self.node} {self.mark}- (else the next run takes a cordon of "
            "yours for its own)."
        )


class NodeUpgrade:
    """Observes, does what comes next, and pauses, until it is done or its time is over."""

    def __init__(
        self,
        client: KubeClient,
        options: UpgradeOptions,
        *,
        say: Callable[[str], None],
        pause_seconds: float,
    ) -> None:
        self._client, self._options, self._say, self._pause = client, options, say, pause_seconds
        self._keys = options.key_prefix
        self._reported: tuple[str, ...] = ()
        self.begun = False
        self.record = Record(options.node, self._keys.cordoned_by)

    async def run(self, stop: asyncio.Event) -> None:
        """Raises Failed with what is left, CannotStart where nothing has been begun."""
        upgrade = await self._begin()
        now = asyncio.get_running_loop().time
        deadline = now() + self._options.timeout
        try:
            while not await self._one_step(upgrade):
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._pause)
                if stop.is_set():
                    raise Failed("stopped.")
                if now() > deadline:
                    raise Failed(f"not done within {self._options.timeout:g} s.")
        except Failed as error:
            waited = f" It waited for {'; '.join(self.record.waiting)}." if self.record.waiting else ""
            raise Failed(f"{self._options.node}: {error}{waited}{self.record.left()}") from error

    async def _begin(self) -> Upgrade:
        try:
            first = await self._observe()
        except NotFound as error:
            raise Failed(f"{error.message}; nothing was done") from error
        except KubeError as error:
            raise CannotStart(f"API server {self._client.host}: {error}") from error
        if not any(True for name in (SERVER, AGENT) for _ in pods_of(first, name)):
            raise Failed(
                f"no pod of {SERVER} or {AGENT} is on {self._options.node}: is it a GPU node, and "
                f"is {self._options.system_namespace} Berth's namespace?"
            )
        upgrade = Upgrade(self._keys, first, agent_only=self._options.agent_only)
        self.begun = True
        if upgrade.moves_models:
            self.record.stayed = [str(ref) for ref in upgrade.stays(first)]
            for name in self.record.stayed:
                self._say(
                    f"{name} stays: no controller would make it elsewhere; its model is loaded again here"
                )
        return upgrade

    async def _one_step(self, upgrade: Upgrade) -> bool:
        """Whether all is done."""
        try:
            observed = await self._observe()
            self.record.cordoned = upgrade.has_cordoned(observed)
            step = upgrade.step(observed)
            refused = [line for action in step.actions for line in await self._do(action)]
        except KubeError as error:
            if not _may_pass(error):
                raise Failed(f"API server {self._client.host}: {error}.") from error
            self._wait_for((f"the API server ({error})",))
            return False
        self._wait_for((*step.waiting, *refused))
        if step.failed:
            raise Failed(f"{step.failed}.")
        self.record.done = step.done
        if step.done:
            self._say(f"{self._options.node} is up to date")
        return step.done

    def _wait_for(self, what: tuple[str, ...]) -> None:
        """Say it once."""
        self.record.waiting = what
        if what and what != self._reported:
            self._say(f"waiting for {'; '.join(what)}")
        self._reported = what

    async def _do(self, action: Action) -> list[str]:
        """One write. Returns why it was refused for now, if it was."""
        match action:
            case Cordon():
                await self._set_cordon("upgrade-node")
                self.record.cordoned = True
                self._say(f"cordoned {self._options.node}")
            case Uncordon():
                await self._set_cordon(None)
                self.record.cordoned = False
                self._say(f"uncordoned {self._options.node}")
            case Evict(ref):
                return await self._evict(ref)
            case Replace(ref):
                with suppress(NotFound, Conflict):  # it is gone already
                    await self._client.delete(paths.pod(ref.namespace, ref.name), uid=ref.uid)
                self.record.replaced.append(str(ref))
                self._say(f"deleted {ref}, whose DaemonSet makes another")
        return []

    async def _evict(self, ref: PodRef) -> list[str]:
        try:
            await evict(self._client, ref)
        except KubeError as error:
            if not _may_pass(error):
                raise
            # 429: its budget does not allow it now. 500: two budgets count it, which an operator must change.
            return [f"leave to evict {ref} ({error})"]
        self.record.evicted.append(str(ref))
        self._say(f"evicted {ref}")
        return []

    async def _set_cordon(self, by: str | None) -> None:
        body = {
            "metadata": {"annotations": {self._keys.cordoned_by: by}},
            "spec": {"unschedulable": None if by is None else True},
        }
        await self._client.patch(paths.node(self._options.node), body)

    async def _observe(self) -> Observed:
        """Raises KubeError."""
        name, namespace = self._options.node, self._options.system_namespace
        wanted = (AGENT,) if self._options.agent_only else (SERVER, AGENT)
        node = await self._client.get(paths.node(name))
        return Observed(
            namespace=namespace,
            node=node,
            revisions={one: await self._revision(namespace, one) for one in wanted},
            pods=tuple((await self._client.get(paths.PODS, fieldSelector=f"spec.nodeName={name}"))["items"]),
            heartbeat=await self._heartbeat(agent_lease_namespace(namespace), name),
        )

    async def _revision(self, namespace: str, name: str) -> str | None:
        """The hash of the DaemonSet's last revision, once its controller has seen the last change."""
        apps = f"/apis/apps/v1/namespaces/{namespace}"
        found = await self._client.get(f"{apps}/daemonsets/{name}")
        meta = found["metadata"]
        if (found.get("status") or {}).get("observedGeneration", 0) < meta["generation"]:
            return None
        labels = found["spec"]["selector"]["matchLabels"]
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        listed = (await self._client.get(f"{apps}/controllerrevisions", labelSelector=selector))["items"]
        return _newest([one for one in listed if _is_owned(one, meta["uid"])])

    async def _heartbeat(self, namespace: str, node: str) -> Json | None:
        try:
            return await self._client.get(paths.lease(namespace, agent_lease_name(node)))
        except NotFound:
            return None


def _newest(revisions: Sequence[Mapping[str, Any]]) -> str | None:
    newest = max(revisions, key=lambda one: one["revision"], default=None)
    return (
        None if newest is None else (newest["metadata"].get("labels") or {}).get("controller-revision-hash")
    )


def _is_owned(thing: Mapping[str, Any], uid: str) -> bool:
    return any(owner["uid"] == uid for owner in thing["metadata"].get("ownerReferences") or ())


def _may_pass(error: KubeError) -> bool:
    """An API server that is unreachable or fails, and a budget that does not allow a pod to go now."""
    return error.status == 409 or may_pass(error)
