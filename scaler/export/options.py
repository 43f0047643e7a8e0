"""The options of what a scaler shows."""

from dataclasses import dataclass
from pathlib import Path

from berth.contract.endpoint import Endpoint
from berth.kube.options import KubeOptions
from berth.runtime import options as opt


@dataclass(frozen=True, kw_only=True)
class ExportOptions(KubeOptions):
    """Who else may ask for figures; unset: no one."""

    external_metrics_listen: Endpoint | None = opt.endpoint(
        "serve external.metrics.k8s.io here to the API server's aggregator; unset: do not"
    )
    keda_listen: Endpoint | None = opt.endpoint("answer KEDA as an external scaler here; unset: do not")
    tls_cert: Path | None = opt.option(
        "certificate of both ports; read again when it changes. KEDA is answered without one, too",
        default=None,
        parse=Path,
        metavar="FILE",
    )
    tls_key: Path | None = opt.option("its private key", default=None, parse=Path, metavar="FILE")
    keda_client_ca: Path | None = opt.option(
        "answer KEDA only if it shows a certificate of this authority",
        default=None,
        parse=Path,
        metavar="FILE",
    )
