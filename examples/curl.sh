#!/bin/sh
# A walk through a served model with curl alone.
#
#   rota serve MODEL --admin-key "$KEY" --directory /adapters      (in another terminal)
#   sh examples/curl.sh http://localhost:8000 "$KEY" /adapters/sql
set -eu
url=$1 key=$2 adapter=$3
json='content-type: application/json'
admin="authorization: Bearer $key"

echo '== health'; curl -sS --fail "$url/health"; echo
echo '== load an adapter (vLLM'"'"'s call)'
curl -sS --fail "$url/v1/load_lora_adapter" -H "$json" -H "$admin" \
     -d "{\"lora_name\": \"sql\", \"lora_path\": \"$adapter\"}"; echo
echo '== models'; curl -sS --fail "$url/v1/models"; echo
echo '== ask it'
curl -sS --fail "$url/v1/chat/completions" -H "$json" \
     -d '{"model": "sql", "messages": [{"role": "user", "content": "How many users?"}], "max_tokens": 16}'; echo
echo '== the same, streamed'
curl -sS --fail -N "$url/v1/completions" -H "$json" \
     -d '{"model": "sql", "prompt": "How many users?", "max_tokens": 8, "stream": true}'
echo '== replace it while it serves'
curl -sS --fail "$url/v1/lora/replace" -H "$json" -H "$admin" -d "{\"name\": \"sql\", \"path\": \"$adapter\"}"; echo
echo '== an adapter nobody knows'
curl -sS "$url/v1/completions" -H "$json" -d '{"model": "nobody", "prompt": "hi"}'; echo
echo '== unload it'
curl -sS --fail "$url/v1/unload_lora_adapter" -H "$json" -H "$admin" -d '{"lora_name": "sql"}'; echo
echo '== metrics'; curl -sS --fail "$url/metrics" | grep '^vllm:lora_requests_info'
