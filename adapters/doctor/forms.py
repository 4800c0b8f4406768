"""Template for a log's documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragorder.adapters.doctor.case import Case, Finding
from ragorder.common.extras import install_hint

if TYPE_CHECKING:
    from ragorder.adapters.learning.suggestion import Saving

_CHECK = "documents' form"
_CAPACITY_TOKENS = 131_072
_LEAST_SHARE = 0.1
_LEAST_SAVING = 0.02
_NO_SAVING = "another order of these documents would save nothing"
_PLACES = "numbers that answers cite then mean places: see the table of applications in docs/proxy.md"
_LEARN = "look at `ragorder template LOG -o app.toml`, and give the file to `ragorder serve --template app.toml`"


def fitting_template(case: Case) -> Finding:
    """Name the preset that fits most requests, or say that a form can be learned."""
    try:
        from ragorder.adapters.learning.suggestion import predict_saving, suggest
        from ragorder.adapters.proxy.bodies.presets import presets
    except ImportError:
        return Finding(_CHECK, "unknown", "not checked", install_hint("proxy"))
    texts = [
        [each.text for each in request.messages if each.role not in ("tools", "documents", "assistant")]
        for request in case.log.requests
    ]
    least = max(2, _LEAST_SHARE * len(texts))
    found = {name: predict_saving(each.template(name), texts, _CAPACITY_TOKENS) for name, each in presets().items()}
    known = {name: (fits, saving) for name, (fits, saving) in found.items() if fits >= least}
    if known:
        name = max(known, key=lambda each: known[each][0])
        preset, (fits, saving) = presets()[name], known[name]
        advice = f"`ragorder serve --template {name}` would save {_share(saving)}"
        if preset.citations == "places":
            advice += f"; {_PLACES}"
        has = f"{fits:,} of {len(texts):,} requests have documents in the form of {preset.application}"
        return _judged(has, saving, advice, preset.note)
    learned = suggest(texts, _CAPACITY_TOKENS)
    if isinstance(learned, str):
        return Finding(_CHECK, "good", f"no application is known by its prompts, and no form is learned: {learned}")
    if learned.refused:
        return Finding(_CHECK, "good", "the text between documents is too plain for a template")
    has = f"{learned.fits:,} of {len(texts):,} requests have documents in one form that can be learned"
    return _judged(has, learned.saving, f"{_LEARN}: it would save {_share(learned.saving)}", "")


def _judged(found: str, saving: Saving | None, advice: str, note: str) -> Finding:
    if saving is None or saving.share < _LEAST_SAVING:
        return Finding(_CHECK, "good", f"{found}: {note or _NO_SAVING}")
    return Finding(_CHECK, "warning", found, advice)


def _share(saving: Saving | None) -> str:
    return f"about {100 * (0.0 if saving is None else saving.share):.0f} % of the prefill"
