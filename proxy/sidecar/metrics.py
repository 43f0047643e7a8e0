"""A replica's figures in Prometheus' text format (exposition_formats.md, 0.0.4). Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from proxy.metrics import GAUGES, MODEL_READY, TOTALS, Family, MetricType
from proxy.request.traffic import Figures

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(figures: Figures, *, is_fresh: bool) -> str:
    """`is_fresh`: False leaves out what is true of one moment only, for that is not known now, and calls the model unready."""
    families = (*TOTALS, *GAUGES) if is_fresh else (*TOTALS, MODEL_READY)
    shown = figures if is_fresh else replace(figures, model_ready=False)
    return "".join(f"{line}\n" for family in families for line in _lines(family, shown))


def _lines(family: Family, figures: Figures) -> Iterator[str]:
    suffix = "_total" if family.type is MetricType.COUNTER else ""
    yield f"# HELP {family.name}{suffix} {family.help}"
    yield f"# TYPE {family.name}{suffix} {family.type.value}"
    for sample in family.samples(figures):
        yield f"{family.name}{sample.suffix}{_labels(sample.labels)} {float(sample.value)}"


def _labels(labels: Mapping[str, str]) -> str:
    said = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
    return f"{{{said}}}" if said else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
