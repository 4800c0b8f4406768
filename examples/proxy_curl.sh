#!/usr/bin/env bash
# The proxy with curl: the same documents in another retrieval order still hit the server's cache.
#
#   UPSTREAM=http://127.0.0.1:8000 examples/proxy_curl.sh
#
# vLLM reports cached tokens with --enable-prompt-tokens-details.
set -euo pipefail

UPSTREAM=${UPSTREAM:-http://127.0.0.1:8000}
PORT=${PORT:-8100}
PROXY=http://127.0.0.1:$PORT

# The proxy runs for as long as this script does.
ragorder serve --upstream "$UPSTREAM" --port "$PORT" &
trap 'kill $! 2>/dev/null; wait' EXIT
curl --silent --fail --output /dev/null --retry 60 --retry-delay 1 --retry-connrefused "$PROXY/ragorder/health"

# Other requests are forwarded unchanged, such as the list of models.
MODEL=${MODEL:-$(curl --silent --fail "$PROXY/v1/models" | python3 -c 'import json, sys; print(json.load(sys.stdin)["data"][0]["id"])')}

NILE='{"id": "nile", "text": "The Nile flows north through eleven countries of Africa, from the lakes below the equator to the delta on the Mediterranean Sea. For five thousand years its floods have made the fields of Egypt fertile."}'
AMAZON='{"id": "amazon", "text": "The Amazon carries more water than the seven next largest rivers together. It rises in the Andes of Peru, crosses the rain forest of Brazil, and reaches the Atlantic Ocean after some 6,400 kilometres."}'
YANGTZE='{"id": "yangtze", "text": "The Yangtze is the longest river of Asia. It springs from the glaciers of the Tibetan Plateau, runs through the Three Gorges, where the largest power station of the world stands, and ends at Shanghai."}'

# One tagged request: documents in retrieval order, and the question.
ask() {
    curl --silent --fail-with-body "$PROXY/v1/chat/completions" --header 'Content-Type: application/json' --data @- <<BODY |
{
    "model": "$MODEL",
    "messages": [{"role": "system", "content": "Answer from the documents."}],
    "max_tokens": 16,
    "ragorder": {"documents": [$1], "query": "Which river is the longest?"}
}
BODY
        python3 -c 'import json, sys
usage = json.load(sys.stdin)["usage"]
details = usage.get("prompt_tokens_details") or {}
print(usage["prompt_tokens"], "prompt tokens, cached:", details.get("cached_tokens", "not reported"))'
}

ask "$NILE, $AMAZON, $YANGTZE"
ask "$YANGTZE, $NILE, $AMAZON"
