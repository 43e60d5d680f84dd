"""Recorded routings: the file behind `routing.distribution=replay`, an .npz of expert ids and scores per token.

Needs numpy and no torch, so that a sweep can refuse a file before anything runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_routing(path: Path, ids_TK: Any, scores_TK: Any, E: int) -> None:
    """Write numpy arrays ids (T, K) and scores (T, K) and the number of experts."""
    import numpy as np

    with path.open("wb") as file:
        np.savez(file, ids=ids_TK, scores=scores_TK, E=np.int64(E))


def read_routing(path: Path, T: int, E: int, K: int) -> tuple[Any, Any]:
    """Ids (T, K) int32 and scores (T, K) fp32 of a recorded routing, as numpy arrays (`sonic.routers.save` writes it).

    ValueError names the file and what is wrong: not such a file, another shape, an id out of range or twice in a token,
    a score that is not finite.
    """
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            ids, scores, experts = file["ids"], file["scores"], int(file["E"])
    except Exception as error:  # whatever numpy and zip make of a foreign file
        raise ValueError(
            f"routing.file is {str(path)!r}: cannot be read ({type(error).__name__}: {error}); "
            "it must be an .npz file with ids, scores and E, as sonic.routers.save writes it"
        ) from None
    for name, array, kind in (("ids", ids, np.integer), ("scores", scores, np.floating)):
        if array.shape != (T, K):
            raise ValueError(
                f"routing.file is {str(path)!r}: its {name} have shape {array.shape}; shape.T and shape.K say {(T, K)}"
            )
        if not np.issubdtype(array.dtype, kind):
            rule = f"they must be {kind.__name__}"
            raise ValueError(f"routing.file is {str(path)!r}: its {name} are {array.dtype}; {rule}")
    if experts != E:
        raise ValueError(f"routing.file is {str(path)!r}: it was recorded with E = {experts}; shape.E is {E}")
    outside = np.argwhere((ids < 0) | (ids >= E))
    if len(outside):
        t, k = outside[0]
        raise ValueError(f"routing.file is {str(path)!r}: token {t} has expert {ids[t, k]}; ids must lie in [0, {E})")
    ordered = np.sort(ids, axis=1)
    twice = np.argwhere(ordered[:, 1:] == ordered[:, :-1])
    if len(twice):
        t, k = twice[0]
        raise ValueError(
            f"routing.file is {str(path)!r}: token {t} has expert {ordered[t, k]} twice; a token's experts must differ"
        )
    if not np.isfinite(scores).all():
        t = int(np.argwhere(~np.isfinite(scores))[0][0])
        raise ValueError(f"routing.file is {str(path)!r}: token {t} has a score that is not finite")
    return ids.astype(np.int32), scores.astype(np.float32)
