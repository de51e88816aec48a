"""Names of the headers in which a relay and those who pull from it agree on more than plain requests.

Invariant: whoever doesn't know one of them works without: he is sent the document alone, and whole versions.
"""

from __future__ import annotations

FOLLOW = "Echo2-Follow"
"""Request header of an announcement: `1` asks for the leaves to follow the document."""
DOCUMENT_SIZE = "Echo2-Document"
"""Answer header: they do, after so many bytes of document."""
BASES = "Echo2-Bases"
"""Request header of an announcement: versions that the asker has complete, so that a delta from one of them will do."""
MAX_BASES = 16
DELTA_SIZE = "Echo2-Delta"
"""Answer header: the last so many bytes of the document are the signed document of a delta that leads there."""
