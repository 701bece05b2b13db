"""Conversations as tokens: equal to transformers, whatever a record or a template looks like."""

import json
from pathlib import Path
from typing import Any

import pytest

from gridformer.data import Tokenizer
from gridformer.data import chat as template_module
from gridformer.data.chat import BUILT_IN, ChatTemplate, encode, messages_of, open_template
from gridformer.utils.errors import DataError, UserError
from tests.support.reference.shared import transformers

TALK = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Who wrote Faust? \u2014 \u00e9\u00df"},
    {"role": "assistant", "content": "Goethe \U0001f642."},
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": "1808"},
]
# Without {% generation %}, as most models have it, with what templates of transformers may use.
UNMARKED = """\
{{ bos_token }}{% for m in messages %}
{% if m.role == 'system' %}{% continue %}{% endif %}
[{{ m['role'] | upper }}] {{ m.content | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}[ASSISTANT] {% endif %}
"""


def tokenizer_of(*special: str) -> Tokenizer:
    made = Tokenizer.train([m["content"] for m in TALK], 280)
    made.add_special(special)
    return made


def theirs(tokenizer: Tokenizer, folder: Path) -> Any:
    """Return transformers' tokenizer."""
    tokenizer.save(folder / "tokenizer.json")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="<|endoftext|>"
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_equal_to_transformers(name: str, tmp_path: Path) -> None:
    stored, needed = open_template(name, None)
    tokenizer = tokenizer_of(*needed)
    want = theirs(tokenizer, tmp_path).apply_chat_template(
        TALK, chat_template=stored.template, return_assistant_tokens_mask=True, return_dict=True
    )
    with stored as template:
        (found,) = encode([TALK], template, tokenizer)
        prompt = template.prompt(TALK[:2])
        whole = template.render(TALK).text
    assert found.ids == want["input_ids"]
    assert [int(said) for said in found.answer] == want["assistant_masks"]
    assert whole.startswith(prompt)
    # The token that ends a turn is learned, too.
    answers = [i for i, said in zip(found.ids, found.answer) if said]
    assert tokenizer.decode(answers) == "Goethe \U0001f642." + "1808".join([needed[-1]] * 2)


def test_answers_of_a_template_that_does_not_mark_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("<s>")
    special = {"bos_token": "<s>", "eos_token": "<|endoftext|>"}
    want = theirs(tokenizer, tmp_path).apply_chat_template(
        TALK, chat_template=UNMARKED, return_dict=True
    )
    with ChatTemplate(UNMARKED, special, "mine") as template:
        (found,) = encode([TALK], template, tokenizer)
        text, answers = (rendered := template.render(TALK)).text, rendered.answers
    assert found.ids == want["input_ids"]
    assert [text[a:b].strip() for a, b in answers] == [
        "Goethe \U0001f642.<|endoftext|>",
        "1808<|endoftext|>",
    ]
    assert tokenizer.decode([i for i, said in zip(found.ids, found.answer) if said]) == "".join(
        text[a:b] for a, b in answers
    )


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for %}", "line 1: "),
        ("{{ raise_exception('no system message') }}", "no system message"),
        ("{{ 'x' * 10 ** 10 }}", "memory"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.listdir('/') }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", "too big"),
        ("{{ messages | length }}", "does not show where answers begin"),
        ("x" * (1 << 18) + "x", "262,144 may be"),
        ("{{ ('x' * 99999) | wordwrap(1) }}", "wordwrap takes at most 65,536 characters"),
        ("{{ ('x ' * 99999) | urlize }}", "urlize takes at most 65,536 characters"),
        ("{{ ('<x' * 99999) | striptags }}", "striptags takes at most 65,536 characters"),
    ],
)
def test_what_a_template_must_not_do_is_an_error(source: str, said: str) -> None:
    with pytest.raises(DataError, match=said), ChatTemplate(source, {}, "bad.jinja") as template:
        template.render(TALK)


def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with ChatTemplate(loops, {}, "loops") as template:
        # Not before, because to start its process may take longer where others have the cores.
        monkeypatch.setattr(template_module, "PATIENCE_S", 1.0)
        with pytest.raises(DataError, match="did not answer within 1 s"):
            template.prompt(TALK)
        assert template._process is not None
        assert template._process.wait(60) != 0


def test_records_of_every_form() -> None:
    asked, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    system = {"role": "system", "content": "s"}
    forms: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
        ({"messages": [asked, said], "id": 3}, [asked, said]),
        ({"instruction": "q", "input": "", "output": "a"}, [asked, said]),
        ({"prompt": "q", "completion": "a", "system": "s"}, [system, asked, said]),
        ({"prompt": [system, asked], "completion": [said]}, [system, asked, said]),
    ]
    for record, want in forms:
        assert messages_of(record, "here") == want
    found = messages_of({"instruction": "add", "input": "1 2", "output": "3"}, "here")
    assert found[0]["content"] == "add\n\n1 2"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"text": "x"}, "is not a conversation; a record has messages, or instruction and output"),
        ({"messages": "x"}, "'messages' is not a list of messages"),
        ({"messages": [{"role": "user", "content": None}]}, r"'messages\[0\]' is NoneType"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\] is not an object with the keys role"),
        ({"prompt": "q", "completion": 3}, "'completion' is int, not text"),
    ]
    for record, said_of in wrong:
        with pytest.raises(DataError, match=f"here: .*{said_of}"):
            messages_of(record, "here")


def test_the_template_of_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither chat_template\.jinja nor"):
        open_template("tokenizer", tmp_path / "tokenizer.json")
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    config["chat_template"] = [{"name": "default", "template": UNMARKED}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    found, _ = open_template("tokenizer", tmp_path / "tokenizer.json")
    assert (found.template, found.special) == (UNMARKED, {"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("newer", encoding="utf-8")
    assert open_template("tokenizer", tmp_path)[0].template == "newer"
    with pytest.raises(UserError, match="takes the template of a tokenizer: name one"):
        open_template("tokenizer", None)
    with pytest.raises(UserError, match="neither chatml, llama3 nor tokenizer"):
        open_template("chatlm", None)
