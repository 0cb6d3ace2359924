"""YAML as people mean it here: 1024-10-10 is a network and no date, and no key comes twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["read_yaml"]


def read_yaml(file: Path) -> Any:
    """The content of a YAML file, plain types only.

    Raises:
        ValueError: not YAML, or a key that comes twice in one mapping.
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
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    line = node.start_mark.line + 1
                    raise ValueError(
                        f"{file.name}: expected every key once, got {key!r} twice "
                        f"in the mapping that begins in line {line}"
                    )
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        letter: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for letter, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    try:
        return yaml.load(file.read_text(encoding="utf-8"), Loader)
    except UnicodeDecodeError:
        raise ValueError(f"{file.name}: expected a YAML file, got bytes that are no text") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{file.name}: expected a YAML file, got an error: {error}") from None
