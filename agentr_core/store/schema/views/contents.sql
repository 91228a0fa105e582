-- What is nested in records, row by row. What belongs to a node has its tree as owner and its index as position, what belongs to
-- a step the trajectory and the step's place in it.

create view step as
select trajectory_id, position, step.*, asked, position < given as given
from (select trajectory_id, given, generate_subscripts(steps, 1) - 1 as position, unnest(steps) as step, unnest(asked) as asked from trajectory);
comment on view step is 'One reply of the model in a trajectory and what it led to; position counts from 0.';
comment on column step.matched is 'The possible action that was carried out in the place of the agent''s, which may be the same; null where the environment takes actions as they are.';
comment on column step.valid is 'Whether the environment took the action; null where it does not tell.';
comment on column step.dropped is 'Exchanges of the history that were left out of what the reply was drawn from (`context: window`).';
comment on column step.summary_of is 'Of a summary (`context: summary`): how many of the first steps it was drawn from; null of a step that acts.';
comment on column step.state_key is 'Key of the state of the world that the action was taken in: steps of one instance that share it were taken in one state. Null from a world that does not tell its state, of a summary, and where it was stored before schema 114.';
comment on column step.given is 'Whether it was recorded before and is what the trajectory goes on from.';

create view generation as
select 'node' as kind, tree_id as owner_id, node_index as position, coalesce(asked.number, -1) as draw, step.reply as reply,
    step.token_ids as token_ids, step.logprobs as logprobs, asked.seed as seed, step.finish_reason as finish_reason,
    asked.prompt_tokens as prompt_tokens, coalesce(asked.completion_tokens, len(step.token_ids)) as completion_tokens,
    step.tokenizer as tokenizer, coalesce(asked.thinks, false) as thinks
from node
where len(step.token_ids) > 0 or coalesce(step.finish_reason, step.tokenizer) is not null or step.logprobs is not null or asked is not null
union all
select 'node', tree_id, node_index, d.number, d.generation.text, d.generation.token_ids, d.generation.logprobs, d.seed,
    d.generation.finish_reason, d.generation.prompt_tokens, d.generation.completion_tokens, d.generation.tokenizer, d.generation.thinks
from (select tree_id, node_index, unnest(merged) as d from node)
union all
select 'step', trajectory_id, position, coalesce(asked.number, -1), reply, token_ids, logprobs, asked.seed, finish_reason,
    asked.prompt_tokens, coalesce(asked.completion_tokens, len(token_ids)), tokenizer, coalesce(asked.thinks, false)
from step
where len(token_ids) > 0 or coalesce(finish_reason, tokenizer) is not null or logprobs is not null or asked is not null
union all
select 'judgement', tree_id, node_index, number, g.text, g.token_ids, g.logprobs, seed, g.finish_reason, g.prompt_tokens,
    g.completion_tokens, g.tokenizer, g.thinks
from (select tree_id, node_index, seed, generate_subscripts(generations, 1) - 1 as number, unnest(generations) as g from judgement);
comment on view generation is 'What the sampler produced for one reply, also for replies that were merged into an equal one.';
comment on column generation.kind is 'node, step or judgement: what the reply belongs to.';
comment on column generation.draw is 'Number of the reply within its request; -1 where only its tokens are known.';
comment on column generation.seed is 'Seed of the request.';
comment on column generation.logprobs is 'Natural-log probability of each token, where they were asked for.';
comment on column generation.finish_reason is 'stop or length (cut by the token limit); null where it is not known.';
comment on column generation.tokenizer is 'Fingerprint of the tokenizer (vocabulary, special tokens, chat template) whose ids token_ids are; null where the backend does not know it: then it is that of the model of the run.';
comment on column generation.thinks is 'Whether the model is known to think first: its prompt opened a thought, or the server returned it apart.';

create view tool_call as
select 'node' as kind, tree_id as owner_id, node_index as position, number, call.*, false as given
from (select tree_id, node_index, generate_subscripts(step.tool_calls, 1) - 1 as number, unnest(step.tool_calls) as call from node)
union all by name
select 'step' as kind, trajectory_id as owner_id, position, number, call.*, given
from (select trajectory_id, position, given, generate_subscripts(tool_calls, 1) - 1 as number, unnest(tool_calls) as call from step);
comment on view tool_call is 'A call of a tool in a step, as the environment tells.';
comment on column tool_call.number is 'Number of the call in its step, from 0.';
comment on column tool_call.provider is 'Who answered: a search index, an interpreter; empty where there is only one.';
comment on column tool_call.key is 'What was asked for in normal form: calls of one tool, provider and key ask the same.';
comment on column tool_call.status is 'ok, empty, error, timeout, or another word of the tool.';
comment on column tool_call.milliseconds is 'How long the call took.';
comment on column tool_call.cached is 'Whether the output came from a cache.';
comment on column tool_call.output is 'As the tool gave it; the observation may show less of it.';
comment on column tool_call.given is 'Whether its step was recorded before and is what the trajectory goes on from: the call was not made again.';

create view answer as
select 'node' as kind, tree_id as owner_id, node_index as position, 'step' as purpose, number, said.*, false as given
from (select tree_id, node_index, generate_subscripts(step.answers, 1) - 1 as number, unnest(step.answers) as said from node)
union all by name
select 'step' as kind, trajectory_id as owner_id, position, 'step' as purpose, number, said.*, given
from (select trajectory_id, position, given, generate_subscripts(answers, 1) - 1 as number, unnest(answers) as said from step)
union all by name
select 'node' as kind, tree_id as owner_id, node_index as position, 'grade' as purpose, 0 as number, said.*, false as given
from (select tree_id, node_index, grading.answer as said from node) where said is not null
union all by name
select 'step' as kind, trajectory_id as owner_id, num_steps - 1 as position, 'grade' as purpose, 0 as number, said.*, false as given
from (select trajectory_id, num_steps, grading.answer as said from trajectory) where said is not null
union all by name
select 'step' as kind, trajectory_id as owner_id, t.num_steps - 1 as position, a.* exclude (trajectory_id, created_at), false as given
from assessment a join trajectory t using (trajectory_id);
comment on view answer is 'What a model was asked on the side of an episode and said: by a step of the environment, by a grader, or about the finished episode.';
comment on column answer.purpose is 'step: the step goes on with it; grade: a reward was read from it; else that of table assessment.';
comment on column answer.number is 'Number of the answer among those of its step and purpose, from 0.';
comment on column answer.role is 'The role of the model: judge, editor, summariser, actor.';
comment on column answer.model is 'Fingerprint of the model.';
comment on column answer.prompt_hash is 'Hash of the messages that it was asked with.';
comment on column answer.thinks is 'As generation.thinks.';
comment on column answer.given is 'Whether its step was recorded before and is what the trajectory goes on from: nobody was asked again.';

create view grade as
with graded as (
    select 'node' as kind, tree_id as owner_id, node_index as position, grading from node where grading is not null
    union all
    select 'step', trajectory_id, num_steps - 1, grading from trajectory where grading is not null
)
select kind, owner_id, position, if(grading.answer is null, 'rule', 'model') as given_by, grading.grade.reward as reward,
    grading.grade.success as success, grading.before.reward as environment_reward, grading.before.success as environment_success
from graded;
comment on view grade is 'The reward of an episode that a grader gave after its last step.';
comment on column grade.given_by is 'rule, or model: then a model was asked, as view answer says.';
comment on column grade.reward is 'In [0, 1]; the step and its trajectory have the same.';
comment on column grade.environment_reward is 'What the environment had given for the step.';

create view message as
select sample_id, position, message.* from (select sample_id, generate_subscripts(messages, 1) - 1 as position, unnest(messages) as message from sample);
comment on view message is 'One turn of a sample.';
comment on column message.train is 'Whether the tokens of the turn carry loss.';
comment on column message.token_ids is 'The tokens as they were sampled; null for a turn that was not sampled.';
comment on column message.finish_reason is 'stop or length (cut by the token limit); null for a turn that was not sampled, and where it is not known.';
comment on column message.tokenizer is 'As generation.tokenizer.';
comment on column message.spans is 'The parts of a turn that was grown by continuation: a reply, or what came of it; its text is theirs, joined.';

create view verdict as
select pair_id, v.position as position, v.verdict as verdict, v.reply as reply, nodes[v.position + 1] as node_index
from (select pair_id, nodes, unnest(verdicts) as v from critique);
comment on view verdict is 'The word of the judge on one step of the bad path of a pair: good, bad, uncertain or unparsable.';
comment on column verdict.node_index is 'The judged node in the tree of the pair.';
