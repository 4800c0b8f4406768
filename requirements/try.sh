#!/usr/bin/env bash
# Tries ragorder at one end of the versions that pyproject.toml allows, in environments of its own that are made from scratch:
# try.sh PYTHON FOLDER lowest|newest [core|langchain|langchain-agents|llama-index …]
#
# core: commands, proxy, clients and events with requirements/lowest.txt. The frameworks have an environment each: their
# lowest versions do not go together. No engine is installed.
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
python=$1 folder=$2 end=$3
shift 3
[ $# -gt 0 ] || set -- core langchain langchain-agents llama-index
tools=('hypothesis>=6.100' jsonschema 'pytest>=8.2,<9' 'pytest-asyncio>=1' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6')
# Of a chat server that the tests of conversations start.
server=(starlette uvicorn)

# make NAME PACKAGE…: an environment with these packages.
make() {
    bin=$folder/$1/bin
    echo "Installing into $folder/$1 (a minute or two, silently)"
    "$python" -m venv --clear "$folder/$1"
    "$bin/python" -m pip --disable-pip-version-check --quiet --no-input install "${tools[@]}" "${@:2}"
    "$bin/python" -m pip --disable-pip-version-check check
}

# tests NAME…: those of tests/*/test_NAME.py, or of a folder tests/*/NAME, that need no engine.
tests() {
    files=()
    for name in "$@"; do
        found=(tests/*/"test_$name.py" tests/*/"$name")
        [ ${#found[@]} -gt 0 ] || { echo "there are no tests named $name" >&2; exit 1; }
        files+=("${found[@]}")
    done
    HF_HUB_OFFLINE=1 "$bin/python" -m pytest -q -p no:cacheprovider -n "${WORKERS:-2}" -m "not vllm" "${files[@]}"
}

try_core() {
    # The lowest openai has no responses, so only the newest SDKs talk to the proxy.
    if [ "$end" = newest ]; then more=(anthropic cohere) clients=(proxy_clients); else more=(-c requirements/lowest.txt) clients=(); fi
    make core -e '.[live,eval,proxy]' "${more[@]}"
    "$bin/ragorder" --help >/dev/null
    for command in order bench eval replay serve engine route fuse stats tiers profile demo doctor; do
        "$bin/ragorder" "$command" --help >/dev/null
    done
    echo '{"documents": ["a", "b"]}' | "$bin/ragorder" order | grep -q '"documents": \["a", "b"\]'
    "$bin/ragorder" bench --workload paper-shuf --limit 50 >/dev/null
    # test_proxy starts `ragorder serve` as a process of its own.
    tests cli_failures options order corpora dependencies doctor document guards kv_events observe openai orderer \
        prompt proxy proxy_queue replay report request_facts settings statistics ${clients[@]+"${clients[@]}"}
}

try_langchain() {
    if [ "$end" = newest ]; then
        make langchain -e '.[langchain]' numpy faiss-cpu langchain-classic langgraph langchain-openai langchain-tests "${server[@]}"
    else
        make langchain -e '.[langchain]' numpy faiss-cpu langchain-core==0.3.73 'langchain<0.4' 'langgraph>=0.6,<0.7' \
            'langchain-openai<0.4' 'langchain-tests<0.4' "${server[@]}"
    fi
    tests langchain langchain_turns workflows
}

try_langchain-agents() {
    if [ "$end" = newest ]; then
        make langchain-agents -e '.[langchain]' 'langchain>=1,<2' langchain-anthropic langchain-openai "${server[@]}"
    else
        make langchain-agents -e '.[langchain]' langchain==1.0.0 'langchain-openai<1.1' "${server[@]}"
    fi
    tests langchain_agents langchain_turns
}

try_llama-index() {
    if [ "$end" = newest ]; then
        make llama-index -e '.[llama-index]' llama-index-llms-openai-like "${server[@]}"
    else
        make llama-index -e '.[llama-index]' llama-index-core==0.12.37 'llama-index-llms-openai-like<0.4' "${server[@]}"
    fi
    tests llama_index llama_index_chat
}

for part in "$@"; do
    "try_$part"
done
