#!/bin/sh
# The coding agent opencode plays one episode, whose task has a field `prompt`:
#   agentr gateway run --reward exit -- sh deployments/agents/opencode.sh "{task.prompt}"
set -eu
# Copies that share their state wait for each other.
for kind in DATA CONFIG STATE CACHE; do export "XDG_${kind}_HOME=$AGENTR_FOLDER/xdg/$kind"; done
options="\"baseURL\": \"$OPENAI_BASE_URL\", \"apiKey\": \"$OPENAI_API_KEY\""
provider="{\"npm\": \"@ai-sdk/openai-compatible\", \"options\": {$options}, \"models\": {\"policy\": {}}}"
# It asks its small model for a title, beside the task.
models='"model": "agentr/policy", "small_model": "agentr/policy"'
export OPENCODE_CONFIG_CONTENT="{\"provider\": {\"agentr\": $provider}, $models, \"permission\": \"allow\"}"
exec opencode run "$1"
