"""Keras, on torch."""

from __future__ import annotations

try:
    import keras
except ImportError as error:
    if error.name != "keras":  # the backend it is set to
        raise ImportError(
            "dynsparse.integrations.keras needs Keras on torch, got a backend that cannot be "
            f"imported ({error}): set KERAS_BACKEND=torch before keras is imported"
        ) from None
    raise ImportError(
        "dynsparse.integrations.keras needs the package keras: pip install 'dynsparse[keras]'"
    ) from None

if keras.config.backend() != "torch":
    raise ImportError(
        f"dynsparse.integrations.keras needs Keras on torch, got {keras.config.backend()}: set "
        "KERAS_BACKEND=torch before keras is imported"
    )

__all__ = ["keras"]
