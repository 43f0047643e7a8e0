"""A real node on this machine: kubelet, containerd, runc and kube-proxy in namespaces and cgroups of their own.

Whatever it makes lies in its own mounts, its own network and its own cgroups; when its owner ends, in
whatever way, all of it is gone. Only tests use it: `make demo` and a user need none of its parts.
"""
