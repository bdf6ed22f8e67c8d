"""Malformed request bodies, each generated from its seed."""

from __future__ import annotations

import json
import random

from llama_cpp import llama_grammar

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTEXTS = "/v1/llmaas/apps/fuzz/contexts"
CALL = f"{CONTEXTS}/{{context}}/call"
NUMBERS = [0, 1, -1, 2, 7, 255, 4095, 4096, 2**31 - 1, 2**31, 2**32, -(2**31) - 1, 2**63, 10**30]
NUMBERS += [0.0, -0.0, 0.5, 1.5, 1e-320, 1e9, 1e38, 1e308, -1e308, -3.5]
TEXTS = ["", "a", "Hi", "\0", "\n", "\\", '"', "é", "\U0001f600", "\u202e", "\ufffd", "</s>", "<s>"]
TEXTS += [
    "x" * 300,
    "[INST]",
    "{{ 1 }}",
    "{% raw %}",
    "%s%n",
    "../..",
    "NaN",
    "5",
    "a\0b",
    " " * 80,
]
ODD = [None, True, False, [], {}, [[]], [None], {"": None}, {"a": {"b": []}}]
FIELDS = ["max_tokens", "min_tokens", "temperature", "top_p", "min_p", "top_k", "seed", "n", "stop"]
FIELDS += ["best_of", "logprobs", "top_logprobs", "presence_penalty", "frequency_penalty", "echo"]
FIELDS += ["repeat_penalty", "mirostat_mode", "mirostat_tau", "mirostat_eta", "suffix", "user"]
FIELDS += ["logit_bias", "logit_bias_type", "model", "level", "stream", "response_format", "tools"]
FIELDS += ["tool_choice", "functions", "function_call", "grammar", "messages", "prompt", "unknown"]
OWN_FIELDS = ["prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repeat_penalty"]
OWN_FIELDS += ["seed", "stop", "stream", "level"]
PATTERNS = ["^a{2,5}$", "^[a-z]+$", "^\\d{3}$", "^(a|b)*$", "^.*$", "a", "^$", "^a{999}$", "^\\$$"]
PATTERNS += ["^[^]$", "^(a+)+$", "^((a?){20}){20}$", "^[\\w.]+@x$", "^(", "^a**$", "^\\u0041$"]
ATOMS = ['"a"', '"b c"', "[a-z]", "[^\\n]", "[\\x00-\\x7F]", "x", "y", "z", '"é"', '"\\""', "."]
TIMES = ["", "", "", "?", "*", "+", "{2}", "{0,3}", "{3,}", "{0}", "{,4}", "{99}"] * 8
TIMES += ["{5,2}"]  # rare: it fills the memory limit, so the rest of its grammar is never built
KINDS = ["string", "integer", "number", "boolean", "null", "object", "array", "odd"]


class Bodies:
    """Generator of one body after another."""

    def __init__(self, seed):
        self._random = random.Random(seed)
        self._pick = self._random.choice

    def request(self):
        """Return a path, with ``{context}`` for a context's name, and a body as bytes."""
        own = [CONTEXTS, CALL, CALL, "/extras/tokenize/count", "/extras/detokenize"]
        path = self._pick([CHAT] * 6 + [COMPLETION] * 4 + own)
        body = {"max_tokens": self._pick([1, 2, 3]), "temperature": self._pick([0.0, 0.8])}
        if path == CHAT:
            body["messages"] = self._messages()
        elif path in (COMPLETION, CALL):
            body["prompt"] = self._pick(["Hi", *TEXTS])
        else:
            tokens = [self._pick([0, 7, 4095, 4096, -1, "1", None])]
            body = self._pick([{"input": self._pick(TEXTS)}, {"system": "x"}, {"tokens": tokens}])
        if self._random.random() < 0.2:
            body["stream"] = True
        for change in self._random.sample(self._changes(path), self._pick([0, 1, 1, 1, 2, 3])):
            change(body)
        return path, self._encoded(body)

    def _changes(self, path):
        changes = [self._field, self._field, self._bias, self._stops, self._nesting]
        if path in (CHAT, COMPLETION):
            changes += [self._with_grammar] * 3
        if path == CHAT:
            changes += [self._with_schema] * 3 + [self._with_tool] * 2
        if path == CALL:
            changes = [self._own_field] * 3 + [self._stops, self._field]
        return changes

    # -- fields ------------------------------------------------------------------------------------

    def _field(self, body):
        body[self._pick(FIELDS)] = self._value()

    def _own_field(self, body):
        body[self._pick(OWN_FIELDS)] = self._value()

    def _value(self):
        return self._pick(self._pick([NUMBERS, NUMBERS, TEXTS, ODD]))

    def _bias(self, body):
        token = self._pick(["0", "7", "4095", "4096", "-1", "1.0", "x", "", "\u0663", "9" * 30])
        body["logit_bias"] = {token: self._pick([*NUMBERS, None, "1"])}
        body["logit_bias_type"] = self._pick(["input_ids", "tokens", None])

    def _stops(self, body):
        body["stop"] = [self._pick(TEXTS) for _ in range(self._pick([1, 4, 64, 65, 2000]))]

    def _nesting(self, body):
        depth = self._pick([10, 70, 500, 5000])
        body[self._pick(FIELDS)] = "\0nested" + str(depth)

    def _messages(self):
        roles = ["user", "assistant", "system", "tool", "function", "wizard", None]
        contents = [
            *TEXTS,
            None,
            5,
            [{"type": "text", "text": "Hi"}],
            [{}],
            [{"type": "image_url"}],
        ]
        if self._random.random() < 0.7:
            return [{"role": "user", "content": "Hi"}]
        n = self._pick([0, 1, 2, 5])
        return [{"role": self._pick(roles), "content": self._pick(contents)} for _ in range(n)]

    # -- grammars ----------------------------------------------------------------------------------

    def _with_grammar(self, body):
        body["grammar"] = self._pick([self.rules, self._damaged, self._deep])()

    def sound_rule(self):
        """Make a grammar that llama.cpp can parse."""
        return f"root ::= {self._expression(3, ATOMS[:5], TIMES[:6])}"

    def rules(self):
        names = ["root", "x", "y", "z"]
        return "\n".join(f"{name} ::= {self._expression(3)}" for name in names)

    def _expression(self, depth, atoms=ATOMS, times=TIMES):
        parts = []
        for _ in range(self._pick([1, 1, 2, 3, 4])):
            inner = depth and self._random.random() < 0.4
            atom = f"({self._expression(depth - 1, atoms, times)})" if inner else self._pick(atoms)
            parts.append(atom + self._pick(times))
        return self._pick([" ", " ", " | "]).join(parts)

    def _damaged(self):
        text = self._pick([llama_grammar.JSON_GBNF, llama_grammar.LIST_GBNF, self.rules()])
        for _ in range(self._pick([0, 1, 3])):
            start = self._random.randrange(len(text) + 1)
            end = start + self._pick([0, 1, 5, 40])
            piece = self._pick(["", text[start:end] * 2, self._pick(TEXTS), self._pick(ATOMS), "("])
            text = text[:start] + piece + text[end:]
        return text

    def _deep(self):
        n = self._pick([5, 50, 500, 5000, 30_000])
        opening, closing = self._pick([("(", ")"), ("(", ")?"), ("(", ")*"), ('("a" | ', ")")])
        return "root ::= " + opening * n + '"a"' + closing * n

    # -- schemas -----------------------------------------------------------------------------------

    def _with_schema(self, body):
        body["response_format"] = {"type": "json_object", "schema": self._schema(3)}

    def _with_tool(self, body):
        name = self._pick(["f", "g", "", '" | "', "é"])
        function = {"name": name, "parameters": self._schema(2)}
        chosen = {"name": self._pick([name, name, "f"])}
        if self._random.random() < 0.5:
            body["functions"] = [function]
            body["function_call"] = self._pick([chosen, "auto", "none"])
        else:
            body["tools"] = [{"type": "function", "function": function}]
            choice = {"type": "function", "function": chosen}
            body["tool_choice"] = self._pick([choice, choice, "auto", "none", "required"])

    def _schema(self, depth):
        kind = self._pick(KINDS)
        schema = {"type": kind}
        limits = [0, 1, 3, 20, 200, 3000, 10**6, -1, "1", None, 1.5]
        if kind == "string":
            named = {"pattern": PATTERNS, "format": ["date", "uuid", "time", "x", None]}
            named |= {"minLength": limits, "maxLength": limits, "enum": [["a", '"'], [], [{}]]}
            key = self._pick(list(named))
            schema[key] = self._pick(named[key])
        elif kind == "object" and depth:
            names = self._random.sample(["a", "b", "", '"', "é", "a b"], self._pick([0, 1, 3]))
            schema["properties"] = {name: self._schema(depth - 1) for name in names}
            schema["required"] = self._pick([names, names[:1], ["z"], None, []])
            schema["additionalProperties"] = self._pick([True, False, {"type": "null"}])
        elif kind == "array":
            schema["items"] = self._schema(depth - 1) if depth else self._pick([[], {}, True])
            schema[self._pick(["minItems", "maxItems"])] = self._pick(limits)
        elif kind == "odd":
            inner = [self._schema(depth - 1) for _ in range(2)] if depth else []
            refs = ["#/properties/a", "#", "#/", "https://127.0.0.1:1/x", "x", None, 5]
            choices = [{key: inner} for key in ("anyOf", "oneOf", "allOf", "enum", "const", "type")]
            schema = self._pick([*choices, {"$ref": self._pick(refs)}, {}, [], None, True])
        return schema

    # -- encodings ---------------------------------------------------------------------------------

    def _encoded(self, body):
        text = json.dumps(body, ensure_ascii=self._random.random() < 0.5)
        for depth in (10, 70, 500, 5000):
            text = text.replace(f'"\\u0000nested{depth}"', "[" * depth + "]" * depth)
        content = text.encode("utf-8", "surrogatepass")
        chance = self._random.random()
        if chance < 0.85:
            return content
        if chance < 0.88:
            return text.encode(self._pick(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))
        damaged = bytearray(content)
        for _ in range(self._pick([1, 3])):
            damaged[self._random.randrange(len(damaged))] = self._random.randrange(256)
        return bytes(damaged) if chance < 0.96 else content[: self._random.randrange(len(content))]
