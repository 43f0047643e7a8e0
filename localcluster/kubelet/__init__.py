"""A process kubelet: runs the pods bound to its node as local processes, DaemonSets' and everybody's.

It does what the real one does for a pod's life: order of containers, environment, volumes, tokens that are
bound to the pod and renewed, probes, restarts with the same back-off, preStop, SIGTERM to the first process,
grace, termination messages, status. What it cannot do it refuses, with an event that says so, instead of
running something else. What it does otherwise than a kubelet:

- Images are not pulled: `images` says which programs stand in for them.
- No mounts: see `rewriting`. A hostPath is a directory below the node's own, TMPDIR names `/tmp`.
- No users, capabilities, read-only roots or CPU limits, no eviction: every process is the caller's.
- A container beyond its memory limit is killed (OOMKilled), but when it is seen, four times a second; see `memory`.
- No network: a pod has a loopback address of its own, a pod with a hostPort that of its node, where its ports
  are then bound without being forwarded. `127.0.0.1` in a command, an argument, a probe or a value is put
  as the pod's address, which any pod can reach; `localhost` and `0.0.0.0`, and what a program has built in,
  are the whole machine's. KUBERNETES_SERVICE_HOST is the API server, and NAME.NAMESPACE, with or without
  .svc, in such a word becomes a Service's address.
- A container's first process is no PID 1: SIGTERM ends it unless it handles it.
- Back-off after crashes is a tenth of a kubelet's (`backoff.HASTE`).
- A pod that is deleted with no grace at all is killed at once; a kubelet gives it a second.
- The Node tells none of the pressures, and its Lease and status are all that a node has to say.
"""
