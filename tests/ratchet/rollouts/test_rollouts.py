"""Questions selected from what an earlier run logged: whose completion, right or wrong, and what is
refused."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.config.load import load_config
from ratchet.config.run import FilterConfig, GrpoConfig, PromptConfig, PromptFormat, RolloutsConfig
from ratchet.errors import UserError
from ratchet.pipeline.plan import make_plan
from ratchet.questions.match import QuestionFinder
from ratchet.rollouts.files import fingerprint, resolve
from ratchet.store.runs import NodeRecord, RunRecord, carrying_out, create_run
from ratchet.store.schemas import read_table
from ratchet.store.store import Store
from tasks.stages import filter as filter_stage
from tasks.stages import rollouts as stage
from tests.support.made_up import Rows, artifact, context, question
from tests.support.made_up_store import commit

QUESTIONS = {
    "one": ("Ann has 3 pens and buys 1 more. How many pens has she?", "4"),
    "two": ("Ann has 3 pens and buys 2 more. How many pens has she?", "5"),
    "three": ("What is 2 + 4?", "6"),
    "never": ("Ben has 9 cups and drops 2 of them. How many are left?", "7"),
}


def asked() -> Rows:
    return [question(name, question=text, gold=gold) for name, (text, gold) in QUESTIONS.items()]


def trl_rows(step: int, name: str, answers: str, **columns: Any) -> Rows:
    """A group as TRL logs it; a digit per completion, '?' for one without an answer."""
    text = QUESTIONS[name][0]
    return [
        {
            "step": step,
            "prompt": f"<|user|>{text}\nAnswer in tags.<|assistant|>",
            "completion": "no idea"
            if answer == "?"
            else f"<start_working_out>\n-\n<end_working_out>\n<SOLUTION>{answer}</SOLUTION>",
            "accuracy_reward": float(answer == QUESTIONS[name][1]),
            "advantage": 0.5,
        }
        | columns
        for answer in answers
    ]


LOGGED = trl_rows(1, "one", "4499") + trl_rows(1, "two", "5555") + trl_rows(2, "three", "1?11")


def write(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def run(
    tmp_path: Path, path: Path, prefilled: str = "", **settings: Any
) -> tuple[Rows, dict[str, Any]]:
    """(scores, summary)."""
    tmp_path.mkdir(exist_ok=True)
    inputs = {
        "questions": artifact(
            tmp_path / "questions",
            "decontaminate",
            {"questions": [*asked(), question("held", role="test")]},
            summary={"prefilled": prefilled},
        )
    }
    ctx = context(tmp_path, inputs)
    result = stage.run(
        ctx,
        prompt=PromptConfig(format=PromptFormat.TAGS),
        rollouts=RolloutsConfig(path=str(path), **settings),
    )
    return read_table(ctx.out_dir / "scores.parquet", "scores").to_pylist(), result.summary


def right(rows: Rows) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        found[row["question_id"]] = found.get(row["question_id"], "") + "-+"[row["lenient"]]
    return found


def test_logged_texts_are_verified_and_grouped_by_question(tmp_path: Path) -> None:
    rows, summary = run(tmp_path, write(tmp_path / "completions.parquet", LOGGED))
    assert right(rows) == {"one": "++--", "two": "++++", "three": "----"}
    assert [row["sample_index"] for row in rows] == [0, 1, 2, 3] * 3
    assert [row["status"] for row in rows][8:10] == ["ok", "parse_failure"]
    assert rows[0]["num_tokens"] is None and rows[0]["truncated"] is None
    assert summary["num_questions"] == 3 and summary["num_train_questions"] == 4
    assert summary["judged_by"].startswith("our verifier, reading the texts in style 'tags'")
    assert summary["steps"] == {"logged": 2, "used": 2, "first": 1, "last": 2}
    assert "from 2 logged steps (1 to 2) and up to as many policies" in summary["policies"]


def test_a_reward_that_the_user_names_decides(tmp_path: Path) -> None:
    rows = [row | {"score": 1.0 if "4" in row["completion"] else 0.25} for row in LOGGED]
    path = write(tmp_path / "completions.parquet", rows)
    found, summary = run(tmp_path / "a", path, reward="score")
    assert right(found) == {"one": "++--", "two": "----", "three": "----"}
    assert summary["judged_by"] == "the logged 'score', right from 0.5 on"
    found, _ = run(tmp_path / "b", path, reward="score", threshold=0.25)
    assert right(found) == {"one": "++++", "two": "++++", "three": "++++"}


def test_first_and_last_steps(tmp_path: Path) -> None:
    folder = tmp_path / "completions"
    for step in (2, 10, 1):  # files are taken in the order of their numbers
        write(folder / f"completions_{step:05d}.parquet", trl_rows(step, "one", f"4{step % 10}"))
    first, summary = run(tmp_path / "a", folder, first_steps=2)
    assert right(first) == {"one": "+-+-"}
    assert summary["steps"] == {"logged": 3, "used": 2, "first": 1, "last": 2}
    last, summary = run(tmp_path / "b", folder, last_steps=1)
    assert right(last) == {"one": "+-"}
    assert summary["policies"] == "All are of step 10, hence of one policy"


def test_a_batch_that_was_logged_again_counts_once(tmp_path: Path) -> None:
    again = [row | {"step": 3} for row in LOGGED if row["step"] == 2]
    write(tmp_path / "t" / "completions_1.parquet", LOGGED)
    write(tmp_path / "t" / "completions_3.parquet", again)
    rows, summary = run(tmp_path / "a", tmp_path / "t")
    assert right(rows)["three"] == "----" and summary["num_repeated"] == 4


def test_the_same_rows_in_every_kind_of_file_give_the_same_scores(tmp_path: Path) -> None:
    """Chat messages as lists, as JSON and as Python writes them are read as text."""
    chat = [
        row
        | {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"]}],
        }
        for row in LOGGED
    ]
    names = list(LOGGED[0])
    write(tmp_path / "p" / "a.parquet", chat)
    files = {name: tmp_path / name for name in ("w.table.json", "j.json", "l.jsonl", "c.csv")}
    table = {"columns": names, "data": [[row[name] for name in names] for row in chat]}
    files["w.table.json"].write_text(json.dumps(table))
    files["j.json"].write_text(json.dumps(chat))
    files["l.jsonl"].write_text("".join(json.dumps(row) + "\n" for row in chat))
    with files["c.csv"].open("w", newline="") as out:
        writer = csv.DictWriter(out, names)
        writer.writeheader()
        writer.writerows(chat)  # messages as Python shows them
    expected, _ = run(tmp_path / "plain", write(tmp_path / "plain.parquet", LOGGED))
    for index, path in enumerate([tmp_path / "p", *files.values()]):
        assert run(tmp_path / str(index), path)[0] == expected, path


def ours(**columns: Any) -> Rows:
    """Rows of our own rollouts table."""
    return [
        {
            "step": 1,
            "question_id": name,
            "sample_index": index,
            "prompt": "p",
            "completion": "no answer to be read",
            "num_tokens": 7,
            "finish_reason": "length" if index else "stop",
            "status": "ok",
            "strict": False,
            "lenient": bool(index),
            "reward": 1.0,
            "advantage": 0.0,
            "policy_version": 0,
        }
        | columns
        for name in ("one", "other run's")
        for index in range(2)
    ]


def test_our_own_rollouts_keep_their_verdicts(tmp_path: Path) -> None:
    earlier = artifact(tmp_path / "grpo", "grpo", {"rollouts": ours()})
    rows, summary = run(tmp_path, earlier.path("rollouts.parquet"))
    assert right(rows) == {"one": "-+"}
    assert [row["truncated"] for row in rows] == [False, True] and rows[0]["num_tokens"] == 7
    assert summary["judged_by"] == "the verdicts that were recorded"
    assert summary["num_other_questions"] == 2


def test_unseen_questions_never_go_to_rl(tmp_path: Path) -> None:
    rows = [*LOGGED, *trl_rows(2, "never", "7")]  # one completion of it
    _, _ = run(tmp_path / "a", write(tmp_path / "completions.parquet", rows))
    questions = [*asked(), question("bare", reference_solution=None)]
    inputs = {
        "questions": artifact(tmp_path / "q", "decontaminate", {"questions": questions}),
        "scores": artifact(tmp_path / "a" / "out", "rollouts", {}),
    }
    ctx = context(tmp_path, inputs)
    result = filter_stage.run(ctx, filter=FilterConfig(), grpo=GrpoConfig(group_size=4))
    table = read_table(ctx.out_dir / "selection.parquet", "selection").to_pylist()
    assert {row["question_id"]: (row["bucket"], row["role"]) for row in table} == {
        "one": ("live", "rl"),
        "two": ("always_right", "warmup"),
        "three": ("always_wrong", "warmup"),
        "never": ("unseen", "warmup"),
        "bare": ("unseen", "dropped"),
    }
    why = {row["question_id"]: row["why"] for row in table}
    assert why["never"] == "1 completion was logged: too few"
    assert why["bare"].endswith("rollouts are used; no reference solution")
    assert result.summary["roles"] == {"rl": 1, "warmup": 3, "dropped": 1}
    assert result.summary["headroom"]["truncated_share"] is None
    assert "cut off: not known" in result.markdown


def test_finding_the_question_in_a_prompt() -> None:
    texts = [text for text, _ in QUESTIONS.values()]
    finder = QuestionFinder(list(QUESTIONS), texts)
    assert finder.in_prompt(f"<|im_start|>user\n{texts[1].upper()}<|im_end|>") == 1
    # a worked example before the question isn't what is asked
    assert finder.in_prompt(f"Q:{texts[0]}\nA: 4\n\nQ:{texts[3]}\nA:") == 3
    assert finder.in_prompt(f"Q:{texts[0]} Q: {texts[2]}") == 2
    assert finder.in_prompt("Ann has 3 pens and buys 7 more. How many pens has she?") is None
    part = "How many are left of the ten?"
    whole = f"{texts[2]} {part}"
    assert QuestionFinder(["a", "b"], [part, whole]).in_prompt(f"{whole} Answer.") == 1


def test_a_question_is_found_as_whole_words_and_numbers_only() -> None:
    sums = QuestionFinder(["a", "b", "c"], ["Compute 1 + 2", "2 + 3", "5 + 1.5?"])
    assert sums.in_prompt("compute 1 + 29") is None
    assert sums.in_prompt("Compute 12 + 35 now") is None
    for number in ("2 + 3.5", "2 + 3,000", "1.2 + 3", "x2 + 3"):
        assert sums.in_prompt(f"Compute {number}") is None, number
    assert sums.in_prompt("2 + 3. Answer.") == sums.in_prompt("Q:2 + 3, then 2 + 35") == 1
    assert sums.in_prompt("Q: 5 + 1.5?Answer.") == 2


def test_a_worked_example_gets_no_completions_of_a_question_that_is_not_ours(
    tmp_path: Path,
) -> None:
    def shots(asked: str) -> str:
        examples = "".join(f"Q: {QUESTIONS[name][0]}\nA: 4\n" for name in ("one", "three"))
        return f"{examples}Q: {asked}\nA:"

    rows = [
        row
        for text in ("What is 7 + 7?", "What is 8 + 8?", QUESTIONS["two"][0])
        for row in trl_rows(1, "two", "55", prompt=shots(text))
    ]
    found, summary = run(tmp_path / "a", write(tmp_path / "t.parquet", rows))
    assert right(found) == {"two": "++"}
    assert (summary["num_unclear"], summary["num_other_questions"]) == (4, 0)
    with pytest.raises(UserError, match="they may be worked examples: log a column"):
        run(tmp_path / "b", write(tmp_path / "others.parquet", rows[:4]))


def test_a_known_kind_of_id_decides_against_the_text(tmp_path: Path) -> None:
    rows = [
        row | {"question_id": name}
        for name in ("one", "other run's")
        for row in trl_rows(1, "one", "44")
    ]
    found, summary = run(tmp_path / "a", write(tmp_path / "t.parquet", rows))
    assert right(found) == {"one": "++"} and summary["num_other_questions"] == 2
    strange = [row | {"question_id": "row 17"} for row in rows]
    found, _ = run(tmp_path / "b", write(tmp_path / "strange.parquet", strange))
    assert right(found) == {"one": "++++"}


def test_texts_are_read_with_the_opening_of_the_prompt_that_was_logged(tmp_path: Path) -> None:
    """A thought that the prompt opened never ends; messages don't say what the template opened."""
    text, thought = QUESTIONS["one"][0], "<|assistant|><think>"
    chat = [{"role": "user", "content": text}]
    rows = [
        row
        for prompt in (f"{text}\n<|assistant|>", f"{text}\n{thought}", str(chat))
        for row in trl_rows(1, "one", "4", prompt=prompt, question=text)
    ]
    found, _ = run(tmp_path / "plain", write(tmp_path / "t.parquet", rows))
    assert [row["lenient"] for row in found] == [True, False, True]
    found, _ = run(tmp_path / "think", tmp_path / "t.parquet", prefilled="<think>")
    assert [row["lenient"] for row in found] == [True, False, False]


@pytest.mark.parametrize(
    ("rows", "settings", "words"),
    [
        ([{"prompt": "p", "loss": 1.0}], {}, "lacks anything to judge by: 'completion'"),
        ([{"completion": "c"}], {}, "lacks a column that tells the question"),
        (LOGGED, {"reward": "acc"}, "has no column 'acc': it has step, prompt, completion, acc"),
        (trl_rows(1, "one", "4"), {}, "one completion per question"),
        (trl_rows(1, "one", "44", prompt="?"), {}, "none of the 2 completions"),
        (trl_rows(1, "one", "??"), {}, "no answer can be read in any of the 2 completions"),
        (
            trl_rows(3, "one", "44", accuracy_reward=float("nan")),
            {"reward": "accuracy_reward"},
            "holds nan in 'accuracy_reward', which is neither right nor wrong",
        ),
        ([{"prompt": "p", "completion": "c"}], {"last_steps": 2}, "need a column 'step'"),
    ],
)
def test_bad_tables_are_refused_in_one_line(
    tmp_path: Path, rows: Rows, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, write(tmp_path / "t.parquet", rows), **settings)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_bad_files_are_refused_in_one_line(tmp_path: Path) -> None:
    def refused(name: str, content: str | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError) as caught:
            run(tmp_path / f"run-{name}", path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "is empty" in refused("empty.parquet", "")
    assert "is no Parquet file" in refused("text.parquet", "no table at all")
    assert "is not JSON" in refused("half.table.json", '{"columns": [')
    assert "holds neither a wandb table" in refused("summary.json", '{"loss": 1}')
    (tmp_path / "latin.csv").write_bytes("step,prompt,completion\n1,é,é\n".encode("latin-1"))
    assert "is not text in UTF-8" in refused("latin.csv", None)
    assert "is no table (.parquet" in refused("notes.txt", "hello")
    assert "there is no" in refused("nowhere", None)
    table = {"columns": list(LOGGED[0]), "data": [list(LOGGED[0].values())[:-1]]}
    assert "don't have a value per column" in refused("short.table.json", json.dumps(table))
    assert "is not JSON" in refused("deep.json", "[" * 10**5)
    assert "with step 'inf'" in refused("inf.csv", "step,prompt,completion\ninf,a,b\n")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "gone.jsonl").symlink_to("moved.jsonl")
    assert "a link to moved.jsonl, which isn't there" in refused("links", None)
    (tmp_path / "folder").mkdir()
    assert "holds no tables" in refused("folder", None)
    pq.write_table(pa.Table.from_pylist(LOGGED).slice(0, 0), tmp_path / "no-rows.parquet")
    assert "holds no completions" in refused("no-rows.parquet", None)


def test_odd_values_and_folders_are_read(tmp_path: Path) -> None:
    """A folder that Spark wrote, a length that isn't known, a text that only begins like
    messages."""
    tokens = ["7", "n/a", "nan", None]
    deep = '[{"content": ' * 10**4
    rows = [
        row | {"num_tokens": count, "completion": deep if count is None else row["completion"]}
        for count, row in zip(tokens, trl_rows(1, "one", "4444"), strict=True)
    ]
    folder = tmp_path / "spark" / "rollouts.parquet"
    write(folder / "part-00000.snappy.parquet", rows)
    (folder / "_SUCCESS").touch()
    for index, path in enumerate((folder.parent, folder)):
        found, _ = run(tmp_path / f"run-{index}", path)
        assert [row["num_tokens"] for row in found] == [7, None, None, None]
        assert right(found) == {"one": "+++-"}


def test_the_content_of_files_is_their_fingerprint(tmp_path: Path) -> None:
    config = RolloutsConfig(path=str(tmp_path / "t"))
    write(tmp_path / "t" / "completions_1.parquet", LOGGED)
    first = fingerprint(config)
    (tmp_path / "t").rename(tmp_path / "moved")
    assert fingerprint(config.model_copy(update={"path": str(tmp_path / "moved")})) == first
    write(tmp_path / "moved" / "completions_2.parquet", LOGGED)
    assert fingerprint(config.model_copy(update={"path": str(tmp_path / "moved")})) != first
    with pytest.raises(UserError, match="there is no"):
        fingerprint(config)


def test_what_was_logged_enters_the_keys(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    folder = tmp_path / "t"

    def keys(*settings: str) -> dict[str, str]:
        plan = make_plan(load_config("demo", [f"rollouts.path={folder}", *settings]), store)
        return {planned.node.name: planned.key for planned in plan.nodes}

    write(folder / "completions_1.parquet", LOGGED)
    first = keys()
    assert keys() == first
    with_gate = keys("headroom.min_live_share=0.5")
    assert with_gate.pop("headroom") and with_gate.keys() == first.keys()
    assert {name for name in first if with_gate[name] != first[name]} == {"report"}
    write(folder / "completions_2.parquet", LOGGED)
    assert {name for name in first if keys()[name] == first[name]} == {
        "model", "questions", "decontaminate", "benchmark", "evaluate.baseline",
    }  # fmt: skip

    named = keys(f"rollouts.path=grpo/{'ab' * 10}")
    assert named["filter"] != keys(f"rollouts.path=grpo/{'cd' * 10}")["filter"]
    assert (
        keys(f"rollouts.path=grpo/{'ab' * 10}", "decontaminate.words=9")["compare"]
        != (named["compare"])
    )


def test_what_a_path_can_name(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    path = write(tmp_path / "t.parquet", LOGGED)
    assert resolve(store, str(path)) == str(path)
    with pytest.raises(UserError, match=r"no file or folder .*latest/grpo, and no run or artifact"):
        resolve(store, "latest/grpo")
    made, died = "ab" * 10, "cd" * 10
    commit(store, "grpo", made, {"rollouts": ours()})
    commit(store, "questions", made, {"questions": asked()})
    for name, key in [("done", made), ("died", died)]:
        record = RunRecord(
            run_id=f"{name}-1",
            name=name,
            created_at="2026-01-01T00:00:00+00:00",
            config={},
            command="",
            targets=["grpo"],
            nodes={n: NodeRecord(stage=n, key=key) for n in ("questions", "grpo")},
        )
        create_run(store, record)
    for named in ("done", "done/grpo", "done-1/grpo", f"grpo/{made[:6]}"):
        assert resolve(store, named) == f"grpo/{made}"
    with pytest.raises(UserError, match="'grpo' of run died-1 has not been made"):
        resolve(store, "died")
    steps = store.work_folder("grpo", died) / "steps"
    write(steps / "rollouts-0000001-0.parquet", ours())
    assert resolve(store, "died/grpo") == str(steps)
    assert right(run(tmp_path / "r", steps)[0]) == {"one": "-+"}
    with (
        carrying_out(store, "died-1", print),
        pytest.raises(
            UserError, match="'died' still grows, as run died-1 is being carried out: wait"
        ),
    ):
        resolve(store, "died")
    with pytest.raises(UserError, match=r"questions/abab.* logged no rollouts: name a GRPO stage"):
        resolve(store, "done/questions")
