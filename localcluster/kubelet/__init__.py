"""A process kubelet: runs the pods bound to its node as local processes.

It does what the real one does for a pod's life (order of containers, environment, volumes, tokens,
probes, restarts, termination, status) and none of what needs a container runtime: images are not
pulled, nothing is confined, and there are no mounts; see `rewriting` for what stands in for them.
What it cannot do it refuses, with an event that says so, instead of running something else.
"""
