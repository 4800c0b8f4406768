"""Exports of other software as logs: Mooncake's traces, and retrievals as Langfuse, LangSmith, OpenTelemetry and
LiteLLM record them. The examples are written after the documentation of each format."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ragorder.eval.cli.replay import replay as command
from ragorder.eval.replay import DefaultLengths, Log, LogError, read_log, replay
from ragorder.eval.replay.formats import FORMATS

TRACE = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"
QUERY = "the merger is on Friday"
LENGTHS = DefaultLengths(document_tokens=100, prefix_tokens=10, suffix_tokens=5, output_tokens=7)

JSON = dict[str, Any]


def packed(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def read(format: str, *lines: Any, **options: Any) -> Log:
    return read_log(io.BytesIO(packed(*lines)), format=format, lengths=LENGTHS, **options)


def lengths(log: Log) -> list[list[int]]:
    return [[log.document_tokens[each] for each in log.ranking(row)] for row in range(len(log))]


def rankings(log: Log) -> list[list[int]]:
    return [log.ranking(row) for row in range(len(log))]


def langchain(id: str | None, text: str, **metadata: Any) -> JSON:
    """A document as LangChain writes it into a trace."""
    return {"id": id, "page_content": text, "metadata": metadata, "type": "Document"}


def observation(output: Any, second: int = 0, **fields: Any) -> JSON:
    """A row of Langfuse's export to a blob storage."""
    row = {"id": f"o{second}", "trace_id": "t", "type": "RETRIEVER", "environment": "default", "level": "DEFAULT"}
    return {**row, "start_time": f"2025-01-31 12:00:{second:02d}.250000", "input": QUERY, "output": output, **fields}


def run(outputs: Any, second: int = 0, **fields: Any) -> JSON:
    """A run of LangSmith."""
    row = {"id": f"r{second}", "trace_id": "t", "name": "VectorStoreRetriever", "run_type": "retriever", "error": None}
    row |= {"start_time": f"2025-01-31T12:00:{second:02d}.250000", "inputs": {"query": QUERY}, "outputs": outputs}
    return row | fields


def attribute(key: str, value: Any) -> JSON:
    return {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}


def nanoseconds(second: int) -> int:
    return 1_738_324_800_000_000_000 + second * 1_000_000_000


def span(*attributes: JSON, second: int = 0, **fields: Any) -> JSON:
    row = {"traceId": "00", "spanId": "00", "name": "retrieve", "startTimeUnixNano": str(nanoseconds(second))}
    return row | {"attributes": [*attributes]} | fields


def openinference(*documents: tuple[str | int | None, str | None], second: int = 0) -> JSON:
    kind = [attribute("openinference.span.kind", "RETRIEVER"), attribute("input.value", QUERY)]
    for place, (id, text) in enumerate(documents):
        prefix = f"retrieval.documents.{place}.document"
        kind += [attribute(f"{prefix}.id", id)] if id is not None else []
        kind += [attribute(f"{prefix}.content", text)] if text is not None else []
    return span(*kind, second=second)


def mlflow(*spans: JSON) -> JSON:
    """A trace as MLflow writes it: each attribute is JSON text."""
    return {"info": {"trace_id": "tr-1", "state": "OK"}, "data": {"spans": [*spans]}}


def mlflow_span(type: str, outputs: Any, second: int = 0, **fields: Any) -> JSON:
    attributes = {"mlflow.spanType": json.dumps(type), "mlflow.spanOutputs": json.dumps(outputs)}
    return {"span_id": "AA==", "start_time_unix_nano": nanoseconds(second), "attributes": attributes} | fields


def found(id: str, text: str, kind: str = "query") -> JSON:
    """An event of a vector database's span."""
    fields = {"id": id, "distance": "0.5"} | ({"document": text} if kind == "query" else {"entity": text})
    attributes = [attribute(f"db.{kind}.result.{name}", value) for name, value in fields.items()]
    return {"name": f"db.{kind}.result", "attributes": attributes}


def traces(*spans: JSON) -> JSON:
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [*spans]}]}]}


def spend(*results: JSON, second: int = 0, **fields: Any) -> JSON:
    """A row of LiteLLM_SpendLogs, whose metadata are JSON text in the database."""
    search = {"vector_store_id": "vs", "query": QUERY, "vector_store_search_response": {"data": [*results]}}
    metadata = {"user_api_key_alias": QUERY, "vector_store_request_metadata": [search] if results else None}
    row = {"request_id": "x", "startTime": f"2025-01-31T12:00:{second:02d}.250000Z", "prompt_tokens": 90}
    return {**row, "completion_tokens": 40, "metadata": json.dumps(metadata), **fields}


def result(file: str | None, text: str | None) -> JSON:
    content = [] if text is None else [{"type": "text", "text": text}]
    return {"file_id": file, "filename": None, "score": 0.5, "content": content}


# Two requests for the same two documents, the second for them in the other order and a third, three seconds later; and
# something that is no retrieval.
A, B, C = ("a", "x" * 40), ("b", "y" * 80), ("c", "z" * 120)
BOTH = [langchain(*A), langchain(*B)]
EXPORTS: dict[str, list[JSON]] = {
    "langfuse": [
        observation(BOTH),
        observation(QUERY, 1, type="GENERATION"),
        observation(json.dumps([langchain(*B), langchain(*A), langchain(*C)]), 3),
    ],
    "langsmith": [
        run({"documents": BOTH}),
        run({"generations": QUERY}, 1, run_type="llm"),
        run({"output": [langchain(*B), langchain(*A), langchain(*C)]}, 3),
    ],
    "otel": [
        traces(span(attribute("gen_ai.operation.name", "chat"), second=1), openinference(A, B)),
        traces(openinference(B, A, C, second=3)),
    ],
    "mlflow": [
        mlflow(mlflow_span("RETRIEVER", BOTH), mlflow_span("CHAIN", QUERY)),
        mlflow(mlflow_span("CHAT_MODEL", [{"role": "assistant", "content": QUERY}], 1)),
        mlflow(mlflow_span("RETRIEVER", [langchain(*B), langchain(*A), langchain(*C)], 3)),
    ],
    "litellm": [spend(result(*A), result(*B)), spend(second=1), spend(result(*B), result(*A), result(*C), second=3)],
}


class TestExports:
    @pytest.mark.parametrize("format", EXPORTS)
    def test_hold_their_retrievals_in_order_of_time_and_end_where_the_limit_is(self, format: str) -> None:
        log = read(format, *reversed(EXPORTS[format]))
        assert (log.at_s.tolist(), log.tenants) == ([0.0, 3.0], 1)
        assert rankings(log) == [[1, 0], [0, 1, 2]]
        assert lengths(log) == [[10, 20], [20, 10, 30]], "estimated from their texts"
        assert len(read(format, *EXPORTS[format], limit=1)) == 1
        assert len(read(format, *EXPORTS[format], top_k=1).documents) == 2

    @pytest.mark.parametrize("format", EXPORTS)
    def test_of_which_nothing_is_a_retrieval_say_what_a_line_looks_like(self, format: str) -> None:
        others = {"otel": traces(span(attribute("a", "b")))}.get(format, EXPORTS[format][1])
        with pytest.raises(LogError, match="no requests in it") as refused:
            read(format, others)
        assert QUERY not in str(refused.value)

    @pytest.mark.parametrize("format", FORMATS)
    def test_the_example_of_a_message_is_a_request(self, format: str) -> None:
        assert len(read(format, json.loads(FORMATS[format].EXAMPLE))) == 1


class TestDocuments:
    def test_without_an_id_are_known_by_their_text(self) -> None:
        log = read("langsmith", run({"documents": [langchain(None, "one two"), langchain(None, "two one")]}))
        assert rankings(log) == [[0, 1]], "of the same length, and yet two"
        again = run({"documents": [langchain(None, "two one")]}, 1)
        assert rankings(read("langsmith", run([langchain(None, "two one")]), again)) == [[0], [0]]

    def test_of_stores_have_their_id_in_the_metadata(self) -> None:
        one, two = (observation([langchain(None, text, chunk_id="c7")], at) for at, text in enumerate(("aaaa", "bbbb")))
        assert rankings(read("langfuse", one, two)) == [[0], [0]]

    def test_without_a_text_have_the_default_length(self) -> None:
        assert lengths(read("otel", traces(openinference(("a", None), (7, None))))) == [[100, 100]]

    def test_of_llama_index_are_in_nodes(self) -> None:
        nodes = [{"node": {"id_": "n1", "text": "x" * 40}, "score": 0.9}]
        assert lengths(read("langfuse", observation(nodes))) == [[10]]

    def test_of_genai_are_structures_or_json_text(self) -> None:
        key = "gen_ai.retrieval.documents"
        documents = [{"id": "doc_123", "score": 0.95}, {"id": "doc_456", "score": 0.87}]
        pairs = [[{"key": "id", "value": {"stringValue": each["id"]}}] for each in documents]
        structured = {"arrayValue": {"values": [{"kvlistValue": {"values": each}} for each in pairs]}}
        text = span(attribute(key, json.dumps(documents)))
        log = read("otel", traces(text, span({"key": key, "value": structured}, second=1)))
        assert rankings(log) == [[0, 1], [0, 1]]

    def test_of_litellm_are_files_where_texts_are_redacted(self) -> None:
        hidden = "REDACTED_BY_LITELM. set store_prompts_in_spend_logs to true"
        log = read("litellm", spend(result("f1", hidden), result("f2", hidden)), spend(result("f1", hidden), second=1))
        assert rankings(log) == [[0, 1], [0]]
        assert log.output_tokens.tolist() == [40, 40]

    def test_of_a_retrieval_that_failed_are_none(self) -> None:
        log = read("langsmith", run(None, error="timeout"), run({}, 1), run({"documents": [langchain(*A)]}, 2))
        assert len(log) == 1

    def test_of_javascript_come_in_milliseconds(self) -> None:
        times = (1_738_324_800_000, 1_738_324_802_500)
        log = read("langsmith", *(run({"documents": [langchain(*A)]}, start_time=time) for time in times))
        assert log.at_s.tolist() == [0.0, 2.5]


OUTPUT = json.dumps({"documents": BOTH, "count": 2})
NODES = json.dumps([json.dumps({"node": {"id_": id, "text": text}, "score": 0.5}) for id, text in (A, B)])
KWARGS = [{"lc": 1, "id": ["Document"], "kwargs": {"page_content": text}} for _, text in (A, B)]
PARTS = json.dumps({"documents": KWARGS})


class TestSpansOfOtherConventions:
    """OpenInference's without flat attributes, OpenLLMetry's, and MLflow's in OTLP."""

    @pytest.mark.parametrize(
        "attributes",
        {
            "OpenInference": {"openinference.span.kind": "RETRIEVER", "output.value": OUTPUT},
            "OpenInference, serialised by LangChain": {"openinference.span.kind": "RETRIEVER", "output.value": PARTS},
            "OpenLLMetry for LangChain": {
                "traceloop.span.kind": "task",
                "gen_ai.operation.name": "vector_db_retrieve",
                "traceloop.entity.output": OUTPUT,
            },
            "OpenLLMetry for LlamaIndex": {"traceloop.entity.name": "retrieve", "traceloop.entity.output": NODES},
            "its newer names": {"traceloop.entity.name": "VectorIndexRetriever.task", "traceloop.entity.output": NODES},
            "MLflow": {"mlflow.spanType": '"RETRIEVER"', "mlflow.spanOutputs": OUTPUT},
        }.values(),
    )
    def test_have_their_documents_in_the_output(self, attributes: dict[str, str]) -> None:
        log = read("otel", traces(span(*(attribute(*each) for each in attributes.items()))))
        assert lengths(log) == [[10, 20]]

    def test_of_vector_databases_have_them_in_events(self) -> None:
        events = [{"name": "db.query.embeddings", "attributes": []}, found(*A), found(*B)]
        log = read("otel", traces(span(attribute("db.system", "chroma"), events=events)))
        assert lengths(log) == [[10, 20]]

    def test_of_several_searches_are_several_requests(self) -> None:
        numbered = [found(id, QUERY, "search") for id in "abc"]
        for event, query in zip(numbered, (0, 0, 1), strict=True):
            event["attributes"].append(attribute("db.search.query.id", query))
        assert rankings(read("otel", traces(span(events=numbered)))) == [[0, 1], [2]]
        queries = attribute("db.chroma.query.texts_count", 2)
        found_by_two = [found(*each) for each in (A, B, C, A)]
        assert rankings(read("otel", traces(span(queries, events=found_by_two)))) == [[0, 1], [2, 0]]
        with pytest.raises(LogError, match="events of 2 queries cannot be told apart: send one at a time"):
            read("otel", traces(span(queries, events=found_by_two[:3])))

    def test_named_as_an_engine_that_retrieves_and_answers_are_none(self) -> None:
        answer = attribute("traceloop.entity.output", json.dumps({"response": QUERY, "source_nodes": []}))
        engine = span(attribute("traceloop.entity.name", "RetrieverQueryEngine.workflow"), answer)
        assert len(read("otel", traces(engine, openinference(A, B)))) == 1


class TestRetrievalsInsideOneAnother:
    """A reranking retriever, the retriever that it asks, and its database are steps of one retrieval."""

    def test_are_one_request_with_the_documents_of_the_outermost(self) -> None:
        def name(id: str, parent: str = "") -> JSON:
            return {"spanId": id, "parentSpanId": parent}

        inner = span(events=[found(*A), found(*B), found(*C)], **name("c", "b"))
        between = span(attribute("gen_ai.operation.name", "embeddings"), **name("b", "a"))
        outer = span(attribute("gen_ai.retrieval.documents", json.dumps([{"id": "a"}])), **name("a", "root"))
        # A line each, ended before its parent, as exporters without batches write them.
        log = read("otel", traces(inner), traces(between), traces(outer))
        assert lengths(log) == [[100]]
        assert log.working_set_tokens == 100, "the others never were in a prompt"

    @pytest.mark.parametrize(
        ("format", "child", "parent"),
        [
            ("langfuse", observation(BOTH, parent_observation_id="o1"), observation([langchain(*B)], 1)),
            ("langfuse", observation(BOTH, parentObservationId="o1"), observation([langchain(*B)], 1)),
            ("langsmith", run(BOTH, parent_run_id="r1"), run([langchain(*B)], 1)),
            (
                "mlflow",
                mlflow(mlflow_span("RETRIEVER", BOTH, parent_span_id="p")),
                mlflow(mlflow_span("RETRIEVER", [langchain(*B)], 1, span_id="p")),
            ),
        ],
    )
    def test_are_told_by_their_parents(self, format: str, child: JSON, parent: JSON) -> None:
        for log in (read(format, child, parent), read(format, parent, child, limit=1)):
            assert lengths(log) == [[20]]

    def test_beside_one_another_are_two(self) -> None:
        log = read("langsmith", *(run([langchain(*A)], at, parent_run_id="chain") for at in (0, 1)))
        assert len(log) == 2


class TestOlderAndOtherExportsOfLangfuse:
    def test_spans_that_are_named_after_a_retriever_are_retrievals(self) -> None:
        spans = [
            observation({"documents": BOTH}, type="SPAN", name="VectorStoreRetriever"),
            observation([langchain(*C)], 1, type="SPAN", name="format_docs"),
            observation(QUERY, 2, type="SPAN", name="retrieval_chain"),
        ]
        assert lengths(read("langfuse", *spans)) == [[10, 20]]

    @pytest.mark.parametrize("cell", [str, json.dumps], ids=["plain", "each a JSON text"])
    @pytest.mark.parametrize("end", ["\n", "\r\n"])
    def test_tables_in_csv_are_read(self, cell: Any, end: str) -> None:
        rows = [
            {"id": "o0", "type": "RETRIEVER", "startTime": "2025-01-31T12:00:00.000Z"},
            {"id": "o1", "type": "GENERATION", "startTime": "2025-01-31T12:00:01.000Z"},
            {"id": "o2", "type": "RETRIEVER", "startTime": "2025-01-31T12:00:03.000Z"},
        ]
        outputs = [BOTH, QUERY, [langchain(*B)]]
        text = io.StringIO(newline="")
        table = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator=end)
        table.writerow([*rows[0], "output", "input", "completionStartTime"])
        for row, output in zip(rows, outputs, strict=True):
            json_text = json.dumps(output)
            table.writerow([*map(cell, row.values()), json_text, cell("two\nlines, and one"), ""])
        log = read_log(io.BytesIO(text.getvalue().encode()), format="langfuse", lengths=LENGTHS)
        assert log.at_s.tolist() == [0.0, 3.0] and lengths(log) == [[10, 20], [20]]

    def test_tables_of_a_database_are_read_too(self) -> None:
        row = spend(result(*A), result(*B))
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, row)
        table.writeheader()
        table.writerow(row)
        log = read_log(io.BytesIO(text.getvalue().encode()), format="litellm", lengths=LENGTHS)
        assert lengths(log) == [[10, 20]] and log.output_tokens.tolist() == [40]

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            (
                '"type","startTime"\n"RETRIEVER","2025-01-31T12:00:00Z"\n"RETRIEVER","soon"\n',
                ':3: "startTime" is not an',
            ),
            ('"type","output"\n"RETRIEVER",""\n', ':2: "start_time" is missing'),
            ('"type","startTime"\n"RETRIEVER","2025\n', ":2: not CSV"),
            ('[{"type": "RETRIEVER"}]\n', ":1: a JSON array: write one object a line (jq -c '.[]' does)"),
            ('[\n{"type": "RETRIEVER"}\n]\n', ":1: a JSON array: write one object a line"),
            ('{\n"type": "RETRIEVER"\n}\n', ":1: JSON over several lines: write one object a line (jq -c '.' does)"),
        ],
    )
    def test_others_are_refused_with_what_to_do(self, tmp_path: Path, data: str, said: str) -> None:
        path = tmp_path / "export"
        path.write_text(data)
        with pytest.raises(LogError) as refused:
            read_log(path, format="langfuse")
        assert f"{path}{said}" in str(refused.value)


class TestALogWhoseRetrievalsCannotBeRead:
    @pytest.mark.parametrize(
        ("format", "line", "reason"),
        [
            ("langfuse", observation(None), "1 retrievals without documents"),
            ("langfuse", observation([langchain(*A)], type="SPAN", name="step"), "give them the type RETRIEVER"),
            ("langsmith", run({}), "1 retrievals without documents"),
            ("litellm", spend(metadata={"vector_store_request_metadata": [{}]}), "1 retrievals without documents"),
            ("mlflow", mlflow(mlflow_span("RETRIEVER", None)), "1 retrievals without documents"),
            ("mlflow", mlflow(mlflow_span("TOOL", [langchain(*A)])), "1 spans with documents that are not marked"),
            ("otel", traces(span(attribute("gen_ai.operation.name", "retrieval"))), "1 retrievals without documents"),
            ("otel", traces(span(attribute("db.operation", "search"))), "let your tracing record their content"),
            (
                "otel",
                traces(span(attribute("openinference.span.kind", "TOOL"), attribute("output.value", OUTPUT))),
                "not marked as retrievals: set openinference.span.kind to RETRIEVER",
            ),
        ],
    )
    def test_says_how_many_and_what_to_do(self, format: str, line: JSON, reason: str) -> None:
        with pytest.raises(LogError, match="no requests in it") as refused:
            read(format, line)
        assert reason in str(refused.value)


class TestBadLines:
    @pytest.mark.parametrize(
        ("format", "line", "said"),
        [
            ("langfuse", {"type": "RETRIEVER", "output": QUERY}, '"start_time" is missing'),
            ("langfuse", observation(QUERY), '"output" is text that is not JSON'),
            ("langfuse", observation({"text": QUERY}), '"output" holds no list of documents'),
            ("langfuse", observation([], start_time=QUERY), '"start_time" is not an ISO 8601'),
            ("langfuse", [observation([langchain(*A)])], "must be an object, not a list: a line looks like"),
            ("langsmith", run({"documents": [{"metadata": {"source": QUERY}}]}), "neither an id nor a text"),
            ("langsmith", run({"documents": [7]}), '"outputs[0]" must be an object'),
            ("langsmith", run({}, run_type=7), '"run_type" must be a string'),
            ("otel", {"resourceSpans": QUERY}, '"resourceSpans" must be a list, not a string'),
            ("otel", traces({**openinference(A), "startTimeUnixNano": QUERY}), "startTimeUnixNano"),
            ("otel", traces(span(attribute("gen_ai.retrieval.documents", QUERY))), "is text that is not JSON"),
            ("litellm", spend(result(None, None)), "neither an id nor a text"),
            ("litellm", spend(metadata=QUERY), '"metadata" is text that is not JSON'),
            (
                "litellm",
                spend(metadata={"vector_store_request_metadata": QUERY}),
                '"vector_store_request_metadata" must be',
            ),
            ("litellm", spend(completion_tokens=-1), '"completion_tokens" must be at least 0'),
            ("mooncake", {"timestamp": 0, "input_length": 2000, "output_length": 1, "hash_ids": [1]}, "too few blocks"),
            ("mooncake", {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}, "at least 1"),
        ],
    )
    def test_name_file_and_line_and_show_nothing(self, tmp_path: Path, format: str, line: Any, said: str) -> None:
        path = tmp_path / "export.jsonl"
        good = EXPORTS.get(format, [json.loads(FORMATS[format].EXAMPLE)])[0]
        path.write_bytes(packed(good, line))
        done = CliRunner().invoke(command, [str(path), "--format", format])
        assert done.exit_code == 1
        assert f"{path}:2: " in done.output and said in " ".join(done.output.split()), done.output
        assert QUERY not in done.output and "Traceback" not in done.output


class TestMooncake:
    def test_a_block_is_a_document_and_the_last_is_the_suffix(self) -> None:
        lines = [
            {"timestamp": 1000, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
            {"timestamp": 3500, "input_length": 1024, "output_length": 8, "hash_ids": [0, 3]},
        ]
        log = read("mooncake", *lines)
        assert log.at_s.tolist() == [0.0, 2.5]
        assert lengths(log) == [[512, 512], [512]]
        assert log.suffix_tokens.tolist() == [76, 512]
        assert [log.prompt_tokens(row) for row in range(2)] == [1100, 1024]
        assert log.output_tokens.tolist() == [9, 8]

    @pytest.mark.skipif(not TRACE.exists(), reason="needs Mooncake's trace")
    def test_the_published_trace_is_read_and_has_nothing_to_order(self) -> None:
        log = read_log(TRACE, format="mooncake", limit=500)
        assert len(log) == 500
        report = replay(log, policies=("retrieval", "prefix"), capacities=["unlimited"], sweep=()).as_json()
        retrieval, best = (run["cached_tokens"] for run in report["runs"])
        assert best <= retrieval and retrieval > 0


class TestTheCommand:
    def test_reports_on_an_export(self, tmp_path: Path) -> None:
        path = tmp_path / "spans.jsonl"
        path.write_bytes(packed(*EXPORTS["otel"]))
        done = CliRunner().invoke(command, [str(path), "--format", "otel", "-o", "-"])
        assert done.exit_code == 0, done.output
        session, record = map(json.loads, done.stdout.splitlines())
        assert record["facts"]["log"]["requests"] == 2 and session["arguments"]["format"] == "otel"

    def test_suggests_a_format(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(b"{}")
        done = CliRunner().invoke(command, [str(tmp_path / "log"), "--format", "langfuze"])
        assert done.exit_code == 2 and "Did you mean 'langfuse'?" in done.output
