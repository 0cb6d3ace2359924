"""YAML as people mean it here: 1024-10-10 is a network and no date, and no key comes twice.

A few hundred bytes of YAML can stand for 9^10 values (aliases of aliases) or recurse without end:
what a file stands for is counted before it is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynsparse.files.shorten import shortened

_MOST_BYTES = 1 << 20
_MOST_VALUES = 50_000
_MOST_DEPTH = 30
_MOST_TEXT = 10_000


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, plain types only.

    Raises:
        ValueError: not YAML, a key that comes twice in one mapping, a tag, or more than a file of
            benchmarks needs: 1 MiB, 50,000 values with those that aliases stand for, 30 levels,
            10,000 characters in one text.
        OSError: the file cannot be read.
        ImportError: the package pyyaml is missing.
    """
    try:
        import yaml
    except ImportError:
        raise ImportError(
            "reading benchmarks needs the package pyyaml: pip install 'dynsparse[apps]'"
        ) from None

    class Loader(yaml.SafeLoader):
        """Safe, without dates and without repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node, deep=True)
                if not isinstance(key, (str, int, float, bool, type(None))):
                    raise ValueError(f"expected keys that are text, got {shortened(key)}")
                if key in seen:
                    line = node.start_mark.line + 1
                    raise ValueError(
                        f"expected every key once, got {shortened(key)} twice "
                        f"in the mapping that begins in line {line}"
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    with open(file, "rb") as stream:
        content = stream.read(_MOST_BYTES + 1)
    try:
        if len(content) > _MOST_BYTES:
            raise ValueError(f"expected at most {_MOST_BYTES:,} bytes of YAML, got more")
        text = content.decode()
        _check_size(yaml, yaml.parse(text, Loader))
        loader = Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except UnicodeDecodeError:
        raise ValueError(f"{file.name}: expected a YAML file, got bytes that are no text") from None
    except yaml.YAMLError as error:
        reason = str(error) if len(str(error)) <= 500 else f"{str(error)[:500]}..."
        raise ValueError(f"{file.name}: expected a YAML file, got an error: {reason}") from None
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None
    except OverflowError:
        raise ValueError(f"{file.name}: expected numbers that fit, got a larger one") from None


class _Counted:
    """A value: how many values it stands for, and how many levels."""

    def __init__(self, anchor: str | None) -> None:
        self.anchor = anchor
        self.values, self.levels = 1, 1

    def add(self, inner: _Counted) -> None:
        self.values += inner.values
        self.levels = max(self.levels, 1 + inner.levels)


def _check_size(yaml: Any, events: Any) -> None:
    """Raise ValueError where the events stand for more than a file of benchmarks needs.

    The parser makes them one by one and without recursion.
    """
    whole = _Counted(None)
    open_ones = [whole]
    anchored: dict[str, _Counted] = {}

    def close(value: _Counted) -> None:
        open_ones[-1].add(value)
        if value.anchor is not None:
            anchored[value.anchor] = value
        if open_ones[-1].values > _MOST_VALUES:
            raise ValueError(f"expected at most {_MOST_VALUES:,} values, got more")

    for event in events:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in anchored:
                raise ValueError(f"expected an alias of a value before it in line {line}")
            close(anchored[event.anchor])
        elif isinstance(event, yaml.NodeEvent):
            if event.tag not in (None, "!"):
                raise ValueError(f"expected no tags, got {shortened(event.tag)} in line {line}")
            value = _Counted(event.anchor)
            if isinstance(event, yaml.ScalarEvent):
                if len(event.value) > _MOST_TEXT:
                    raise ValueError(
                        f"expected texts of at most {_MOST_TEXT:,} characters, got "
                        f"{len(event.value):,} in line {line}"
                    )
                close(value)
            else:
                open_ones.append(value)
        elif isinstance(event, yaml.CollectionEndEvent):
            close(open_ones.pop())
        if len(open_ones) > _MOST_DEPTH or open_ones[-1].levels > _MOST_DEPTH:
            raise ValueError(f"expected at most {_MOST_DEPTH} levels, got more in line {line}")
