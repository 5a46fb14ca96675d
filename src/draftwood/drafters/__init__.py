"""Drafters, one family a file. The engine imports none of them; `draftwood.assembly` builds them by name."""
