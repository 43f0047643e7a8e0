"""The proxy's Prometheus metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class ProxyMetrics:
    """Registered in the given registry. `protocol` is rest or grpc; `code` an HTTP or gRPC status."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "berth_proxy_requests", "requests answered", ("protocol", "code"), registry=registry
        )
        self._seconds = Histogram(
            "berth_proxy_request_seconds",
            "from a request's arrival to its answer's end",
            ("protocol",),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.running = Gauge("berth_proxy_running_requests", "requests inside Triton", registry=registry)
        self.waiting = Gauge("berth_proxy_waiting_requests", "requests in the queue", registry=registry)
        # Knative's names, which dashboards and autoscalers know.
        self.concurrency = Gauge(
            "queue_average_concurrent_requests", "average concurrency over the last second", registry=registry
        )
        self.rate = Gauge(
            "queue_requests_per_second", "requests that arrived in the last second", registry=registry
        )
        self.model_ready = Gauge("berth_proxy_model_ready", "1 if Triton serves the model", registry=registry)

    def answered(self, protocol: str, code: str, seconds: float) -> None:
        self._requests.labels(protocol, code).inc()
        self._seconds.labels(protocol).observe(seconds)
