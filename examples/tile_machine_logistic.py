"""Logistic regression trained on the tiles: products, softmax and gradients.

`python tile_machine_logistic.py FOLDER` reads MNIST from a folder with its four files; without them
it uses scikit-learn's digits. Weights stay on the tiles; images and labels arrive through streams;
the host reads the weights at the end.
"""

import sys

import numpy as np

from dynsparse import data
from popsparse.machine import FLOAT, Copy, Engine, Graph, Profile, Repeat, Sequence, Target
from popsparse.tensor_ops import elementwise, matmul, reduce, softmax

BATCH, CLASSES = 64, 10


def build(features: int, steps: int, rate: float, target: Target) -> tuple[Graph, Sequence]:
    """A program of `steps` steps of stochastic gradient descent."""
    graph, step = Graph(target), Sequence()
    images = graph.add_variable(FLOAT, [BATCH, features], "images")
    labels = graph.add_variable(FLOAT, [BATCH, CLASSES], "labels")
    weight = graph.add_variable(FLOAT, [features, CLASSES], "weight")
    bias = graph.add_variable(FLOAT, [CLASSES], "bias")
    for tensor in (images, labels, weight, bias):
        graph.map_linearly(tensor, grain=2)
    for tensor in (weight, bias):
        graph.set_initial_value(tensor, 0)
    for tensor, name in ((images, "images"), (labels, "labels")):
        stream = graph.add_stream(name, FLOAT, tensor.numel, to_device=True)
        step.add(Copy(stream, tensor, name=f"{name} from host"))

    product = matmul(graph, images, weight, step, name="forward")
    logits = elementwise(graph, "add", [product, bias], step, name="add bias")
    shares = softmax(graph, logits, step)
    # The gradient of the cross-entropy with respect to the logits: softmax minus labels.
    error = elementwise(graph, "subtract", [shares, labels], step, name="error")
    gradient = matmul(graph, images.transpose(), error, step, name="gradient")
    down = -rate / BATCH
    elementwise(graph, "scaled add", [weight, gradient, down], step, out=weight, name="learn")
    total = reduce(graph, error, 0, step, name="gradient of bias")
    elementwise(graph, "scaled add", [bias, total, down], step, out=bias, name="learn bias")
    return graph, Repeat(steps, step)


def images_of(folder: str | None) -> data.DataSet:
    if folder is not None:
        try:
            return data.load("mnist", folder)
        except OSError as error:
            print(f"no MNIST there, so digits: {error}")
    return data.load("digits")


def train(
    found: data.DataSet, epochs: int = 3, rate: float = 0.5, tiles: int = 32
) -> tuple[float, Profile, Engine]:
    """Train; return the test accuracy, the profile and the engine."""
    images, labels = found.train.images.numpy(), found.train.labels.numpy()
    steps = len(images) // BATCH
    graph, program = build(images.shape[1], epochs * steps, rate, Target.bow(tiles=tiles))
    engine = Engine(graph, program)
    rng = np.random.default_rng(0)
    orders = np.concatenate([rng.permutation(len(images))[: steps * BATCH] for _ in range(epochs)])
    batches = iter(orders.reshape(-1, BATCH))
    current = np.zeros(BATCH, int)

    def next_images() -> np.ndarray:
        current[:] = next(batches)
        return images[current].reshape(-1)

    engine.connect("images", next_images)
    engine.connect("labels", lambda: np.eye(CLASSES, dtype=np.float32)[labels[current]].reshape(-1))
    profile = engine.run()
    logits = found.test.images.numpy() @ engine.read("weight") + engine.read("bias")
    right = logits.argmax(1) == found.test.labels.numpy()
    return float(right.mean()), profile, engine


def main() -> None:
    found = images_of(sys.argv[1] if len(sys.argv) > 1 else None)
    accuracy, profile, _ = train(found, epochs=3 if found.name == "digits" else 1)
    print(profile.summary(12))
    print(f"{found.name}: accuracy on the test images {accuracy:.3f}")


if __name__ == "__main__":
    main()
