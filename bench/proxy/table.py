"""Figures by scenario and who was measured, and how they are shown."""

from collections.abc import Mapping

from bench.proxy.peers import BERTH, OTHERS, OWN

# Scenario → who → figure.
Table = dict[str, dict[str, float]]
# Of Berth's parts: what its figure over a peer's may be, or, of no peer (""), what it may be itself.
Targets = Mapping[str, Mapping[str, float]]


def render(table: Table, targets: Mapping[str, Targets]) -> str:
    """A Markdown table: a line for each part of Berth, its figure over each peer's with the target where there is one."""
    lines = [f"| | berth | {' | '.join(OTHERS)} |", f"|---|---|{'---|' * len(OTHERS)}"]
    for scenario, figures in table.items():
        for part in (peer.name for peer in OWN):
            if part in figures:
                label = scenario if part == BERTH.name else f"{scenario}: {part}"
                wanted = targets.get(scenario, {}).get(part, {})
                cells = [_cell(figures[part], figures.get(peer), wanted.get(peer)) for peer in OTHERS]
                own = _number(figures[part]) + _judged(figures[part], wanted.get(""))
                lines.append(f"| {label} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(own: float, peer: float | None, target: float | None) -> str:
    if peer is None or peer <= 0:
        return "–"
    ratio = own / peer
    judged = "" if target is None else f", target {target}" + " missed" * (ratio > target)
    return f"{_number(peer)} (×{ratio:.2f}{judged})"


def _judged(figure: float, target: float | None) -> str:
    return "" if target is None else f" (target {target:g}{' missed' * (figure > target)})"


def _number(figure: float) -> str:
    return f"{figure:.2f}" if figure < 1 else f"{figure:.1f}" if figure < 1000 else f"{figure:.0f}"
