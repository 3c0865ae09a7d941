"""The confusion matrix and the scores of classes, beside scikit-learn's."""

import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from regard.task.classes import SHOWN, Confusion


def drawn(classes: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(classes, (count,)), torch.randint(classes, (count,))


def test_scores_are_scikit_learns() -> None:
    right, chosen = drawn(5, 97)
    found = Confusion.of(list("abcde"), right, chosen)
    assert found.counts.tolist() == confusion_matrix(right, chosen).tolist()
    precision, recall, f1, support = precision_recall_fscore_support(right, chosen)
    for n, one in enumerate(found.scores()):
        assert one["precision"] == pytest.approx(precision[n])
        assert one["recall"] == pytest.approx(recall[n])
        assert one["f1"] == pytest.approx(f1[n])
        assert one["examples"] == support[n]
    assert found.macro_f1 == pytest.approx(f1.mean())


def test_classes_without_examples_divide_nothing() -> None:
    found = Confusion.of(["a", "b", "c"], torch.tensor([0, 0]), torch.tensor([0, 1]))
    assert [one["f1"] for one in found.scores()] == pytest.approx([2 / 3, 0, 0])
    assert found.macro_f1 == pytest.approx(2 / 3)  # of the one class that there is


def test_what_is_shown() -> None:
    found = Confusion.of(["no", "yes"], torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    assert found.lines() == [
        "class  precision  recall      f1  examples",
        "no         1.000   0.500   0.667         2",
        "yes        0.500   1.000   0.667         1",
        "",
        "        no  yes   ← chosen",
        "no       1    1",
        "yes      0    1",
    ]


def test_of_many_classes_the_worst_confusions_are_shown() -> None:
    labels = [f"class {n}" for n in range(SHOWN + 1)]
    right = torch.tensor([3, 3, 3, 5, 7])
    chosen = torch.tensor([4, 4, 3, 6, 7])
    lines = Confusion.of(labels, right, chosen).lines()
    assert lines[-3:] == ["most often confused:", "class 3 → class 4: 2", "class 5 → class 6: 1"]
