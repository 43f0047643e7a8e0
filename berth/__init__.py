"""What every Berth process shares: contracts, Kubernetes and Triton adapters, process runtime."""

__version__ = "0.1.0"
