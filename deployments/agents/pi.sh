#!/bin/sh
# The coding agent pi plays one episode, whose task has a field `prompt`:
#   agentr gateway run --reward exit -- sh deployments/agents/pi.sh "{task.prompt}"
# PI_API chooses the protocol: openai-completions, openai-responses or anthropic-messages.
set -eu
export PI_CODING_AGENT_DIR="$AGENTR_FOLDER/pi" PI_OFFLINE=1
api=${PI_API:-openai-completions}
url=$OPENAI_BASE_URL
if [ "$api" = anthropic-messages ]; then url=$ANTHROPIC_BASE_URL; fi
mkdir -p "$PI_CODING_AGENT_DIR"
# The address is the episode's own, so the file is written anew for each.
cat > "$PI_CODING_AGENT_DIR/models.json" <<END
{"providers": {"agentr": {"baseUrl": "$url", "api": "$api", "apiKey": "OPENAI_API_KEY", "models": [{"id": "policy"}]}}}
END
exec pi -p --no-session --provider agentr --model policy "$1"
