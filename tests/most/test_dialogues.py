import errno
import json
import resource

import pytest

from datamodules.dialogues import read_dialogues, speak_dialogues
from datamodules.speech import check_files, read_manifest


def dialogue(*turns):
    roles = ("user", "assistant")
    return json.dumps({"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]})


def test_every_answered_question_becomes_a_spoken_row(tmp_path):
    code = dialogue("Write code.", "```python\nprint(1)\n```")
    (tmp_path / "d.jsonl").write_text(
        "\n".join([dialogue("How old?", "Nine.", "And you?", "Ten."), code, dialogue("Who?")])
    )
    manifest, rows, skipped = speak_dialogues(tmp_path / "d.jsonl", tmp_path / "out")
    assert (rows, skipped) == (2, 1)
    made = read_manifest(manifest)
    assert [(row.text, row.answer) for row in made] == [("How old?", "Nine."), ("And you?", "Ten.")]
    assert len({row.split for row in made}) == 1, "one dialogue is in one split"
    assert all(seconds > 0.2 for seconds in check_files(made))


def test_lines_that_are_no_dialogue_are_numbered(tmp_path):
    (tmp_path / "d.jsonl").write_text(dialogue("a", "b") + '\n{"text": 1}\nnonsense\n')
    with pytest.raises(ValueError, match="line 2: KeyError .*; line 3: JSONDecodeError"):
        read_dialogues(tmp_path / "d.jsonl")
    (tmp_path / "e.jsonl").write_text(dialogue("Only asked."))
    with pytest.raises(ValueError, match="no dialogue that can be spoken"):
        speak_dialogues(tmp_path / "e.jsonl", tmp_path)
    (tmp_path / "f.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"f\.jsonl is not text in UTF-8"):
        read_dialogues(tmp_path / "f.jsonl")


def test_dialogues_that_do_not_fit_on_the_disk_leave_nothing(tmp_path):
    (tmp_path / "d.jsonl").write_text(dialogue("How old are you?", "Nine."))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    try:
        with pytest.raises(OSError) as error:
            speak_dialogues(tmp_path / "d.jsonl", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert error.value.errno == errno.EFBIG
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["audio"]
