import pytest
import torch

from planner.errors import ModelError
from planner.zoo import random_batch, text_batch
from planner.zoo.text import continued_text_batch, masked_text_batch


def test_text_is_python_source_and_labels_are_the_next_bytes():
    batch = text_batch(3, 64, 256, seed=1)
    text = bytes(batch["input_ids"].flatten().to(torch.uint8).tolist())

    assert batch["input_ids"].shape == batch["labels"].shape == (64, 256)
    assert batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"][:, 1:], batch["labels"][:, :-1])
    assert b"self" in text
    assert b"return" in text


def test_text_is_a_function_of_seed_and_step():
    first, again = text_batch(5, 4, 32, seed=2), text_batch(5, 4, 32, seed=2)

    assert torch.equal(first["input_ids"], again["input_ids"])
    assert not torch.equal(first["input_ids"], text_batch(6, 4, 32, seed=2)["input_ids"])
    assert not torch.equal(first["input_ids"], text_batch(5, 4, 32, seed=3)["input_ids"])
    assert not torch.equal(first["input_ids"], text_batch(5, 4, 32, seed=-2)["input_ids"])


def test_random_values_stay_in_the_range_of_the_example():
    example = {
        "ids": torch.tensor([[3, 9], [5, 4]]),
        "mask": torch.ones(2, 2, dtype=torch.int64),
        "labels": torch.tensor([[-100, 7], [8, 7]]),
        "images": torch.zeros(2, 3, 4, dtype=torch.float64),
        "clicked": torch.tensor([0.0, 1.0]),
        "flag": torch.tensor([True, True]),
        "table": torch.arange(5),
    }
    batch = random_batch(example, global_batch=300, seed=0, step=0)

    assert isinstance(batch, dict)
    assert list(batch) == list(example)
    assert set(batch["ids"].unique().tolist()) == set(range(3, 10))
    assert set(batch["mask"].unique().tolist()) == {1}
    assert set(batch["labels"].unique().tolist()) == {-100, 7, 8}
    assert batch["images"].shape == (300, 3, 4)
    assert batch["images"].dtype == torch.float64
    assert batch["images"].std().item() == pytest.approx(1, abs=0.1)
    assert set(batch["clicked"].unique().tolist()) == {0.0, 1.0}
    assert batch["flag"].all()
    assert batch["flag"].shape == (300,)
    assert torch.equal(batch["table"], torch.arange(5))


def test_random_batches_are_a_function_of_seed_and_step():
    example = (torch.zeros(2, 3), torch.tensor([0, 9]))
    first, again, next_step = (random_batch(example, global_batch=8, seed=1, step=s) for s in (0, 0, 1))

    assert isinstance(first, tuple)
    assert isinstance(again, tuple)
    assert isinstance(next_step, tuple)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], next_step[0])


def test_an_example_on_meta_gives_small_integers_on_the_cpu():
    example = {"ids": torch.empty(2, 5, dtype=torch.int32, device="meta")}
    batch = random_batch(example, global_batch=50, seed=0, step=0, vocabulary=11)

    assert isinstance(batch, dict)
    assert batch["ids"].device.type == "cpu"
    assert batch["ids"].dtype == torch.int32
    assert set(batch["ids"].unique().tolist()) == set(range(11))


def test_an_example_without_a_batch_is_refused():
    with pytest.raises(ModelError, match="no batch dim; put the batch on its dim 0"):
        random_batch((torch.tensor(1.0),), global_batch=2, seed=0, step=0)


def test_masked_text_hides_as_many_bytes_in_every_sample_and_asks_for_those():
    batch = masked_text_batch(3, 8, 40, seed=1, mask_token=256)
    plain = text_batch(3, 8, 39, seed=1)
    masked = batch["labels"] != -100

    assert masked.sum(1).tolist() == [6] * 8
    assert bool((batch["input_ids"] == 256).eq(masked).all())
    assert torch.equal(batch["input_ids"].where(~masked, batch["labels"])[:, :-1], plain["input_ids"])
    assert not torch.equal(masked, masked_text_batch(4, 8, 40, seed=1, mask_token=256)["labels"] != -100)


def test_continued_text_goes_on_where_the_input_ends():
    batch = continued_text_batch(0, 4, 16, seed=0)
    whole = text_batch(0, 4, 31, seed=0)

    assert torch.equal(torch.cat((batch["input_ids"], batch["labels"]), dim=1)[:, :-1], whole["input_ids"])
