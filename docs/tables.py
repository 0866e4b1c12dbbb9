"""Put the tables of results/ into the pages, so that any viewer of Markdown shows them: python docs/tables.py

A table stands between `<!-- results/NAME/table.md -->` and `<!-- end -->`.
"""

import re
from pathlib import Path

HERE = Path(__file__).parent
_PLACE = re.compile(r"(<!-- (results/\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """The text of a page with every table as its file has it now."""
    return _PLACE.sub(lambda found: f"{found[1]}\n{(HERE.parent / found[2]).read_text().strip()}\n\n{found[3]}", text)


if __name__ == "__main__":
    for page in HERE.glob("*.md"):
        page.write_text(with_tables(page.read_text()))
