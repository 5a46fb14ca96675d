"""What the demo asks: one ordinary question, and three tasks whose answers repeat their prompts.

They were picked by trying a dozen, to show both ends of what lookup can do: their median is no benchmark. The
embedded model is small; its answers are not always right, but always its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A prompt with a name."""

    title: str
    text: str


_CODE = """Rename the class Basket to Cart. Print the whole code again.

```python
class Basket:
    def __init__(self):
        self.items = []

    def add(self, name, price):
        self.items.append((name, price))

    def total(self):
        return sum(price for name, price in self.items)
```"""

_TEXT = """Copy the sentences that mention a river from this text, word for word.

The town of Ashford lies on the river Stour. It was founded in the ninth century. The old bridge over the \
river Stour was built in 1520 and repaired in 1834. Trains have stopped there since 1842. Every spring the \
river Stour floods the meadows south of the town."""

_TABLE = """Write an HTML table with the columns Name and City for: Anna from Oslo, Bernd from Bremen, \
Chiara from Turin, Elif from Izmir."""

PROMPTS = (
    DemoPrompt("A question", "Why is the sky blue? Answer in three sentences."),
    DemoPrompt("Edit code", _CODE),
    DemoPrompt("Extract", _TEXT),
    DemoPrompt("Markup", _TABLE),
)
