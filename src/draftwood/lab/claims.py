"""What others have published about the order of laws, checked on the rows at hand."""

from __future__ import annotations

import math
from dataclasses import dataclass

from draftwood.lab.replay import Results


@dataclass(frozen=True)
class Claim:
    """One law is said to beat another on a kind of tree, at temperature 1."""

    says: str
    published: str
    family: str
    paths: int
    law: str
    over: str

    def check(self, results: Results, temperature: float = 1.0) -> dict[str, object]:
        """Whether it does here: the difference in the same contexts, with two standard errors either side.

        Undecided (None) where that leaves room for both.
        """
        mine, others, error = results.gain(temperature, self.family, self.paths, self.law, self.over)
        line: dict[str, object] = {
            "claim": self.says,
            "published": self.published,
            "here": "not measured",
            "holds": None,
        }
        if math.isnan(mine) or math.isnan(error):
            return line
        low, high = ((mine - others + side * 2 * error) / others for side in (-1, 1))
        here = f"{mine:.3f} vs {others:.3f}: {mine / others - 1:+.1%} ({low:+.1%} to {high:+.1%})"
        return line | {"here": here, "holds": True if low > 0 else False if high < 0 else None}


CLAIMS = (
    Claim("block over token, one path", "+5 to +8 % (Sun et al. 2024)", "paths", 1, "block", "token"),
    Claim("GBV over SpecInfer, 2 paths", "4.43 vs 3.26 (Thomas, Pal 2026)", "paths", 2, "gbv", "rrs"),
    Claim("GBV over SpecInfer, 3 paths", "4.27 vs 3.24 (Thomas, Pal 2026)", "paths", 3, "gbv", "rrs"),
    Claim(
        "traversal over top-down, 2 children without replacement",
        "+2.2 to +5.7 % (Weng et al. 2025)",
        "without-replacement",
        2,
        "traversal",
        "rrsw",
    ),
    Claim(
        "traversal over top-down, 4 children without replacement",
        "+2.2 to +5.7 % (Weng et al. 2025)",
        "without-replacement",
        4,
        "traversal",
        "rrsw",
    ),
    Claim("traversal over SpecInfer, 3 paths", "2.954 vs 2.520 on GSM8K", "paths", 3, "traversal", "rrs"),
    Claim("layered over top-down hybrid, 2 children", "+2.5 % (UniVer, 2026)", "hybrid", 2, "layer", "hybrid"),
)


def check_claims(results: Results) -> list[dict[str, object]]:
    """All of them."""
    return [claim.check(results) for claim in CLAIMS]
