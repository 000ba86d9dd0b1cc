"""The collectives of Llama and BERT: what is planned for real widths against Megatron's formulas, and counted small."""

import pytest

from benchmarks.tensor_parallel import CASES, FORMS, Case, Row, rows

pytestmark = pytest.mark.timeout(300)  # 15 s where nothing else runs


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.model)
def found(request: pytest.FixtureRequest) -> list[Row]:
    case: Case = request.param
    return list(rows(case))


def test_layers_embedding_and_head_communicate_what_megatron_does(found: list[Row]) -> None:
    compared = [row for row in found if row.form != "found" and row.part != "loss"]

    assert len(compared) == 2 * 3 * 2  # forms, parts, passes
    for row in compared:
        assert row.planned == row.megatron, row
    assert sum(number for row in compared for _, number, _ in row.planned) == (2 + 2 + 2) + (2 + 8 + 2)


def test_a_loss_gathers_four_numbers_of_every_rank_for_each_token_once(found: list[Row]) -> None:
    for row in found:
        if row.part == "loss" and row.form != "found":
            context = next(case for case in CASES if case.model == row.model).config.context
            once = (("all_gather", 1, 4.0 * 4 * row.degree * context),)
            assert row.planned == (once if row.phase == "forward" else ())


def test_what_is_found_moves_no_more_bytes_in_a_layer_than_either_way_of_megatron(found: list[Row]) -> None:
    def wire_bytes(form: str) -> float:
        """What a rank sends at least, over rings: an all-reduce is a reduce-scatter and an all-gather."""
        return sum(
            number * num_bytes * (2 if collective == "all_reduce" else 1)
            for row in found
            if row.form == form and row.part == "layer"
            for collective, number, num_bytes in row.planned
        )

    of_forms = {form: wire_bytes(form) for form in FORMS}

    assert of_forms["found"] <= of_forms["column/row"] == of_forms["sequence parallel"]


def test_lowered_blocks_communicate_what_was_planned(found: list[Row]) -> None:
    for row in found:
        assert row.counted == row.small_planned, row
    in_megatron_form = [row for row in found if row.form != "found"]
    for row in in_megatron_form:  # small models in the same form as real ones
        assert [(c, n) for c, n, _ in row.counted] == [(c, n) for c, n, _ in row.planned], row


def test_a_collective_that_was_not_planned_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import tensor_parallel

    case = CASES[0]
    small, model = tensor_parallel.graph_of(case.small, precision="fp32", device="cpu")
    shardings = tensor_parallel.shardings_of(small, 2, "column/row", tensor_parallel._SLOW)
    planned = tensor_parallel.planned(small, shardings, 2, "cpu")
    counted, loss = tensor_parallel.counted(small, model, shardings, 2)
    assert counted == planned

    once = tensor_parallel.Counting.all_reduce
    monkeypatch.setattr(tensor_parallel.Counting, "all_reduce", lambda self, x: once(self, once(self, x) / self.size))
    more, same_loss = tensor_parallel.counted(small, model, shardings, 2)

    assert more != planned
    assert same_loss == pytest.approx(loss)
