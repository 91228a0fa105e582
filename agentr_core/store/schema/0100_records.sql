-- Ids are 16 hexadecimal digits of a content hash unless said otherwise; all times are UTC.
-- A table of records has a column for each field of its dataclass in `agentr_core/types.py` or `store/tables.py`, of the type
-- that `store/records.py` derives; a test compares the two. Nested records are structs, and what is in them has no key of its own:
-- the views of `views/contents.sql` show it row by row.
-- There are no foreign keys: DuckDB then forbids updates of parents that have children (statistics of a tree change while it
-- grows). The view v_orphans lists every dangling reference instead, and tests keep it empty.

create table run (
    run_id varchar primary key,
    recipe varchar not null,
    method varchar not null,
    config json not null,
    versions json not null,
    workspace varchar not null,
    status varchar not null,
    started_at timestamp not null,
    finished_at timestamp,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table run is 'One execution of a recipe.';
comment on column run.recipe is 'Name of the recipe.';
comment on column run.config is 'The resolved recipe: every default filled in.';
comment on column run.versions is 'Versions of the program and of the libraries that ran.';
comment on column run.status is 'What was recorded last: running, finished or failed; evaluating: there is only an evaluation of its model, which is not done; collecting: there is only what was gathered for its first iteration. A killed process records nothing more: v_runs tells.';

create table stage_input (
    run_id varchar not null,
    stage varchar not null,
    input_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, stage)
);
comment on table stage_input is 'What decides the replies of a stage, as one hash for each run, and for stage dataset the SHA-256 of its general data; runs of earlier versions have none.';
comment on column stage_input.input_id is 'Hash of all that the replies depend on, beside checkpoint, iteration and instance: runs with equal ones take over trees, judgements and rollouts of each other.';

create table iteration (
    iteration_id varchar primary key,
    run_id varchar not null,
    iteration integer not null,
    checkpoint_in varchar,
    checkpoint_out varchar,
    status varchar not null,
    finished_at timestamp,
    promoted varchar,
    collected_by varchar,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table iteration is 'One turn of the wheel of a run.';
comment on column iteration.iteration is 'Counts from 1; 0 is the evaluation of the model the run starts from.';
comment on column iteration.checkpoint_in is 'The policy: what the iteration before promoted. It collects, unless collected_by names another.';
comment on column iteration.checkpoint_out is 'The policy that was trained, once it is.';
comment on column iteration.promoted is 'The checkpoint that goes on after this iteration: of those made so far, the model that the run begins with among them, the one that succeeds most often on the development set. Null before it is known, and where the last one goes on.';
comment on column iteration.collected_by is 'The checkpoint that plays the training instances, where it is not the policy: the teacher.';

create table instance (
    instance_id varchar primary key,
    depth bigint,
    origin_id varchar,
    environment varchar not null,
    split varchar not null,
    instance_index bigint not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table instance is 'One problem of an environment.';
comment on column instance.instance_id is 'environment/split/index.';
comment on column instance.depth is 'Difficulty class, where the environment has one.';
comment on column instance.origin_id is 'The instance that this one is a variant of (renamed, say); null where it is one of its own. Intervals are clustered by it.';

create table chosen_instance (
    iteration_id varchar not null,
    name varchar not null,
    position integer not null,
    instance_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, name, position)
);
comment on table chosen_instance is 'The instances that an iteration collects from, in their order, and under iteration 0 the held-out ones of its run.';
comment on column chosen_instance.name is 'train; of iteration 0: test, or the name of a set of `evaluation.sets`.';
comment on column chosen_instance.position is 'Counts from 0.';

create table planned_rollout (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    position integer not null,
    instance_id varchar not null,
    number integer not null,
    forced integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table planned_rollout is 'The episodes of an iteration''s exploration. One without a row in trajectory is not played yet, or failed for good.';
comment on column planned_rollout.position is 'Its place among the episodes of the iteration, from 0.';
comment on column planned_rollout.number is 'Its number among the episodes of its instance; 0 is greedy.';
comment on column planned_rollout.forced is 'How many of its first steps are the expert''s.';

create table tree (
    tree_id varchar primary key,
    instance_id varchar not null,
    dives_done bigint not null,
    finished boolean not null,
    copied_from varchar,
    iteration_id varchar not null,
    checkpoint_id varchar not null,
    config json not null,
    instance struct(environment varchar, split varchar, index bigint) not null,
    first_observation varchar not null,
    seed bigint not null,
    writer varchar,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table tree is 'One search tree, finished or half grown.';
comment on column tree.dives_done is 'Completed dives.';
comment on column tree.copied_from is 'The tree that this one is a copy of, as another run with the same `stage_input` first grew it; null for a tree that was grown here. Its judgements are copies, too, where the judge was the same.';
comment on column tree.checkpoint_id is 'The policy that searched.';
comment on column tree.config is 'Settings of the search.';
comment on column tree.instance is 'As table instance has it.';
comment on column tree.writer is 'The process that grows the tree, or grew it last; rows of another are refused. Null: no process said so.';

create table node (
    tree_id varchar not null,
    node_index bigint not null,
    asked struct(seed bigint, number bigint, prompt_tokens bigint, completion_tokens bigint, thinks boolean),
    merged struct(seed bigint, number bigint, generation struct(text varchar, token_ids bigint[], finish_reason
        varchar, prompt_tokens bigint, completion_tokens bigint, logprobs double[], tokenizer varchar, thinks
        boolean))[] not null,
    grading struct(grade struct(reward double, success boolean), before struct(reward double, success boolean),
        answer struct(role varchar, model varchar, prompt_hash varchar, seed bigint, text varchar, finish_reason
        varchar, prompt_tokens bigint, completion_tokens bigint, thinks boolean)),
    parent bigint not null,
    depth bigint not null,
    step struct(reply varchar, action varchar, observation varchar, reward double, matched varchar, valid boolean,
        terminated boolean, success boolean, disaster boolean, token_ids bigint[], logprobs double[], finish_reason
        varchar, tokenizer varchar, dropped bigint, tool_calls struct(tool varchar, provider varchar, parameters
        varchar, key varchar, status varchar, milliseconds double, cached boolean, output varchar)[], answers
        struct(role varchar, model varchar, prompt_hash varchar, seed bigint, text varchar, finish_reason varchar,
        prompt_tokens bigint, completion_tokens bigint, thinks boolean)[]),
    visits bigint not null,
    value_sum double not null,
    terminal boolean not null,
    stop varchar,
    dive bigint not null,
    duplicates bigint not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table node is 'A step in a search tree, or its root (index 0, parent -1, no step). v_nodes shows the steps column by column.';
comment on column node.asked is 'The request that the step came of: seed, number of the reply, and tokens; null where no model was asked.';
comment on column node.merged is 'Further replies of the same request that are equal to this one''s step and were merged into it.';
comment on column node.grading is 'The grade of the episode that ends here, where a grader gave one, and what the environment had given.';
comment on column node.step is 'The step, of which v_nodes shows the parts; null of a root.';
comment on column node.visits is 'Backed-up rewards; value_sum / visits is the value of the node.';
comment on column node.terminal is 'No further expansion is possible here.';
comment on column node.stop is 'Why the path ended here, on nodes where one did.';
comment on column node.dive is 'The dive that made the node.';
comment on column node.duplicates is 'Sampled replies this node stands for, after equal siblings were merged; 0 where its step is the expert''s.';

create table judgement (
    tree_id varchar not null,
    node_index bigint not null,
    iteration_id varchar not null,
    copied_from varchar,
    seed bigint not null,
    dropped_steps bigint not null,
    verdict varchar not null,
    votes varchar[] not null,
    generations struct(text varchar, token_ids bigint[], finish_reason varchar, prompt_tokens bigint,
        completion_tokens bigint, logprobs double[], tokenizer varchar, thinks boolean)[] not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table judgement is 'The word of the judge on one node.';
comment on column judgement.copied_from is 'The tree on which the judgement was first made, if not on this one.';
comment on column judgement.seed is 'Seed of the request.';
comment on column judgement.dropped_steps is 'Oldest steps left out of the prompt to make it fit.';
comment on column judgement.votes is 'The verdict of each reply, in the order of the draws.';
comment on column judgement.generations is 'The replies of the judge.';

create table oracle_verdict (
    tree_id varchar not null,
    node_index integer not null,
    verdict varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table oracle_verdict is 'The true verdict on a step of a judged path, where the environment knows it; a report of an iteration asks for it and stores it.';
comment on column oracle_verdict.verdict is 'good, bad or uncertain.';

create table trajectory (
    trajectory_id varchar primary key,
    instance_id varchar not null,
    num_steps bigint not null,
    given bigint not null,
    asked struct(seed bigint, number bigint, prompt_tokens bigint, completion_tokens bigint, thinks boolean)[] not
    null,
    grading struct(grade struct(reward double, success boolean), before struct(reward double, success boolean),
        answer struct(role varchar, model varchar, prompt_hash varchar, seed bigint, text varchar, finish_reason
        varchar, prompt_tokens bigint, completion_tokens bigint, thinks boolean)),
    source varchar not null,
    iteration_id varchar,
    evaluation_id varchar,
    tree_id varchar,
    copied_from varchar,
    leaf bigint,
    instance struct(environment varchar, split varchar, index bigint) not null,
    first_observation varchar not null,
    steps struct(reply varchar, action varchar, observation varchar, reward double, matched varchar, valid
        boolean, terminated boolean, success boolean, disaster boolean, token_ids bigint[], logprobs double[],
        finish_reason varchar, tokenizer varchar, dropped bigint, tool_calls struct(tool varchar, provider varchar,
        parameters varchar, key varchar, status varchar, milliseconds double, cached boolean, output varchar)[],
        answers struct(role varchar, model varchar, prompt_hash varchar, seed bigint, text varchar, finish_reason
        varchar, prompt_tokens bigint, completion_tokens bigint, thinks boolean)[])[] not null,
    reward double not null,
    success boolean not null,
    stop varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table trajectory is 'The steps of one episode with its final reward.';
comment on column trajectory.given is 'How many of its first steps were recorded before: they are what it goes on from, and their calls and questions were not made again.';
comment on column trajectory.asked is 'The request that each step came of, as node.asked.';
comment on column trajectory.grading is 'The grade, where a grader gave one, and what the environment had given.';
comment on column trajectory.source is 'tree: a path of a tree; rollout: collected alone; episode: of an evaluation; splice: a splice played live; expert; bare: an expert''s episode before it has its thoughts; ungraded: an episode that waits for its grade, with the reward that it had without one; or a word of the method that made it.';
comment on column trajectory.copied_from is 'As tree.copied_from, for rollouts.';
comment on column trajectory.instance is 'As table instance has it.';
comment on column trajectory.steps is 'The steps in their order, of which v_steps shows the parts.';
comment on column trajectory.success is 'The success flag of the environment, or of the grader.';
comment on column trajectory.stop is 'success, failure, disaster, step_limit, context_limit, or repeats: the same reply in the same state too often (`evaluation.repeats`).';

create table derivation (
    child_id varchar not null,
    parent_id varchar not null,
    iteration_id varchar not null,
    operator varchar not null,
    position bigint,
    prompt_hash varchar not null,
    seed bigint,
    round bigint,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (child_id, parent_id)
);
comment on table derivation is 'A trajectory that a method made of another one.';
comment on column derivation.child_id is 'trajectory_id of what was made.';
comment on column derivation.parent_id is 'trajectory_id of what it was made of; a child of several parents has a row for each.';
comment on column derivation.operator is 'What the method calls the way: operators of a flywheel; branch: leaves an episode of its group; revision: goes on from a failed episode.';
comment on column derivation.position is 'The step at which the child leaves the parent, counted from 0; null where it is another one as a whole.';
comment on column derivation.prompt_hash is 'Hash of the prompt by which a model was asked for it, or of the hashes of several; empty where none was.';
comment on column derivation.seed is 'Seed of what was drawn for it; null where nothing was.';
comment on column derivation.round is 'The round of a flywheel in which it was made; null where there are no rounds.';

create table family (
    family_id varchar primary key,
    iteration_id varchar not null,
    instance_id varchar not null,
    checkpoint_id varchar not null,
    members integer not null,
    rounds integer not null,
    ended_by varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table family is 'A question whose flywheel is at its end; its trajectories have source flywheel.';
comment on column family.checkpoint_id is 'The policy.';
comment on column family.rounds is 'How many rounds there were.';
comment on column family.ended_by is 'rounds: all that were wanted; members: no room for more; tokens: the limit of what models write; no-child: a round made none.';

create table edit (
    edit_id varchar primary key,
    instance_id varchar not null,
    subject varchar not null,
    prompt varchar not null,
    iteration_id varchar not null,
    role varchar not null,
    model varchar not null,
    prompt_hash varchar not null,
    seed bigint not null,
    text varchar not null,
    finish_reason varchar not null,
    prompt_tokens bigint not null,
    completion_tokens bigint not null,
    thinks boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table edit is 'What a model was asked about a trajectory in order to make another one of it, and said.';
comment on column edit.subject is 'What was to be made. Of a family its member: names from the first trajectory on, each with round and operator; I0 locates a step for I1 and I2. Of an expert''s episode its name, the step before which a thought was to stand, and the try.';
comment on column edit.prompt is 'Name of the prompt with a hash of its words.';
comment on column edit.role is 'The role of the model: editor, reflector.';
comment on column edit.prompt_hash is 'Hash of the messages.';
comment on column edit.seed is 'Seed of the request.';
comment on column edit.text is 'The reply.';
comment on column edit.thinks is 'Whether the model is known to think first: its prompt opened a thought, or the server returned it apart.';

create table assessment (
    trajectory_id varchar not null,
    purpose varchar not null,
    number bigint not null,
    role varchar not null,
    model varchar not null,
    prompt_hash varchar not null,
    seed bigint not null,
    text varchar not null,
    finish_reason varchar not null,
    prompt_tokens bigint not null,
    completion_tokens bigint not null,
    thinks boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (trajectory_id, purpose, number)
);
comment on table assessment is 'What a model said of a finished trajectory; the trajectory itself has the answers that its steps and its grader asked for.';
comment on column assessment.purpose is 'What it was asked for: conciseness, or a word of the method that asked.';
comment on column assessment.number is 'Its number among those of its trajectory and purpose, from 0.';
comment on column assessment.prompt_hash is 'Hash of the messages that it was asked with.';

create table answered_call (
    call_id varchar primary key,
    tool varchar not null,
    provider varchar not null,
    parameters json not null,
    key varchar not null,
    status varchar not null,
    milliseconds double not null,
    cached boolean not null,
    output varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table answered_call is 'What a tool answered, for later calls that ask the same; a failure is not among them. tool_call has the calls of each step.';
comment on column answered_call.call_id is 'Hash of tool, provider, parameters and key.';
comment on column answered_call.parameters is 'What decides the answer beside the key: how many documents, of which corpus.';
comment on column answered_call.key is 'What was asked for in normal form.';
comment on column answered_call.status is 'ok, or empty: the tool found nothing.';
comment on column answered_call.milliseconds is 'How long the provider took.';
comment on column answered_call.cached is 'As the call said that was stored.';
comment on column answered_call.output is 'As the tool gave it.';

create table pair (
    pair_id varchar primary key,
    iteration_id varchar not null,
    tree_id varchar not null,
    good_leaf integer not null,
    bad_leaf integer not null,
    shared_steps integer not null,
    good_reward double not null,
    bad_reward double not null,
    gap double not null,
    position integer,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table pair is 'A good and a bad path of one tree.';
comment on column pair.good_leaf is 'node_index of the last node of the good path.';
comment on column pair.shared_steps is 'Steps both paths have in common from the root.';
comment on column pair.gap is 'good_reward - bad_reward.';
comment on column pair.position is 'Its place among the pairs of its tree, from 0.';

create table critique (
    pair_id varchar primary key,
    nodes bigint[] not null,
    iteration_id varchar not null,
    verdicts struct(position bigint, verdict varchar, reply varchar)[] not null,
    first_error bigint,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table critique is 'The finished judgement of the bad path of a pair.';
comment on column critique.nodes is 'The nodes of the bad path; empty where they are not known.';
comment on column critique.verdicts is 'The word of the judge on each step that it saw, of which view verdict shows the parts.';
comment on column critique.first_error is 'Position of the first bad step, counted from 0 at the root; null when none is bad.';

create table sample (
    sample_id varchar primary key,
    iteration_id varchar not null,
    instance_id varchar,
    pair_id varchar,
    trajectory_id varchar,
    tree_id varchar,
    num_tokens bigint,
    num_trained_tokens bigint,
    kind varchar not null,
    messages struct(role varchar, text varchar, train boolean, token_ids bigint[], finish_reason varchar,
        tokenizer varchar, spans struct(text varchar, train boolean, token_ids bigint[], finish_reason varchar,
        tokenizer varchar)[], example boolean)[] not null,
    instance struct(environment varchar, split varchar, index bigint),
    provenance struct(tree_id varchar, good_leaf bigint, bad_leaf bigint, split bigint, cut bigint, good_reward
        double, bad_reward double, extra varchar) not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table sample is 'A conversation to train on. v_samples shows its messages.';
comment on column sample.trajectory_id is 'The stored episode behind the sample: a path of a tree, an episode of the expert or of the policy; null where there is none, as for splices of all modes but `continued`.';
comment on column sample.kind is 'revision, good, general, expert, judge, chosen, rejected, or a word of the method that made it.';
comment on column sample.messages is 'Its turns, of which view message shows the parts.';
comment on column sample.instance is 'As table instance has it.';
comment on column sample.provenance is 'What it was made of: the good and the bad leaf of its tree, the steps that they share, and how many of the bad path were kept up to the first error; and further facts, as JSON.';

create table rejection (
    iteration_id varchar not null,
    stage varchar not null,
    subject varchar not null,
    reason varchar not null,
    detail varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, stage, subject, reason)
);
comment on table rejection is 'Something a filter turned away, and why.';
comment on column rejection.subject is 'Id or key of what was turned away; of stage splice, the pair_id or, of a good path, tree_id:leaf.';

create table preference (
    preference_id varchar primary key,
    iteration_id varchar not null,
    kind varchar not null,
    instance_id varchar,
    chosen_sample_id varchar not null,
    rejected_sample_id varchar not null,
    chosen_reward double,
    rejected_reward double,
    margin double,
    dropped_steps integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table preference is 'Two samples that go on from the same conversation, one better than the other. v_preferences leads to their trajectories.';
comment on column preference.kind is 'lose, win, step, own, tree or file: what made one side better.';
comment on column preference.chosen_reward is 'Final reward of the trajectory behind the chosen side; null where a file does not tell.';
comment on column preference.margin is 'chosen_reward - rejected_reward.';
comment on column preference.dropped_steps is 'Steps cut off the end of the rejected side.';

create table dataset (
    dataset_id varchar primary key,
    iteration_id varchar not null,
    hash varchar not null,
    counts json not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table dataset is 'The training set of an iteration; hash is over its rows in order.';

create table dataset_row (
    dataset_id varchar not null,
    position integer not null,
    sample_id varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (dataset_id, position)
);
comment on table dataset_row is 'Which sample stands at which place of a dataset.';

create table checkpoint (
    checkpoint_id varchar primary key,
    parent_id varchar,
    dataset_id varchar,
    iteration_id varchar,
    path varchar not null,
    weights_sha256 varchar not null,
    config json not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table checkpoint is 'A model directory; the model a run starts from has no parent, dataset or iteration.';
comment on column checkpoint.parent_id is 'What it was trained from; of the model that a run starts from, the checkpoint of another run with the same weights, where there is one.';
comment on column checkpoint.config is 'Settings of the training.';

create table training_step (
    checkpoint_id varchar not null,
    step integer not null,
    loss double not null,
    trained_tokens bigint not null,
    seconds double not null,
    chosen_logps double,
    rejected_logps double,
    chosen_rewards double,
    rejected_rewards double,
    reward_accuracy double,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (checkpoint_id, step)
);
comment on table training_step is 'One optimizer step of the training of a checkpoint.';
comment on column training_step.trained_tokens is 'Tokens that carried loss up to here.';
comment on column training_step.seconds is 'Time spent in training up to here.';
comment on column training_step.chosen_logps is 'Preference training: mean log-probability of the chosen sides of the step, summed over their replies.';
comment on column training_step.chosen_rewards is 'Preference training: beta times the log-ratio of policy and reference, mean over the chosen sides.';
comment on column training_step.reward_accuracy is 'Preference training: share of pairs of the step whose chosen side has the higher implicit reward.';

create table evaluation (
    evaluation_id varchar primary key,
    iteration_id varchar not null,
    checkpoint_id varchar not null,
    name varchar not null,
    split varchar not null,
    config json not null,
    finished boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table evaluation is 'One evaluation of a checkpoint on a split.';
comment on column evaluation.name is 'test: the held-out instances of `instances.test`; revision_test starts from failed prefixes; other names are the sets of `evaluation.sets`.';

create table episode (
    evaluation_id varchar not null,
    instance_id varchar not null,
    repeat integer not null,
    cut integer not null,
    trajectory_id varchar not null,
    invalid_actions integer,
    environment_seconds double,
    sampling_seconds double,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (evaluation_id, instance_id, repeat, cut)
);
comment on table episode is 'One episode of an evaluation.';
comment on column episode.repeat is 'Number of the episode among those of its instance, from 0.';
comment on column episode.cut is 'Steps replayed from a failed episode before the model took over, in a revision test; otherwise 0.';
comment on column episode.invalid_actions is 'Actions the environment called invalid; null where it does not tell.';

create table revision_state (
    run_id varchar not null,
    position integer not null,
    trajectory_id varchar not null,
    repeat integer not null,
    cut integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (run_id, position)
);
comment on table revision_state is 'The states from which the revision test of a run goes on: chosen once, from failed episodes of its first model, for every model that is tested.';
comment on column revision_state.run_id is 'The run; in a comparison that of the pool.';
comment on column revision_state.repeat is 'Number of the failed episode among those of its instance.';
comment on column revision_state.cut is 'Steps of the failed episode that are replayed.';

create table metric (
    scope varchar not null check (scope in ('run', 'iteration', 'evaluation')),
    scope_id varchar not null,
    name varchar not null,
    value double,
    low double,
    high double,
    n bigint,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (scope, scope_id, name)
);
comment on table metric is 'A number of a report with its 95% interval, where it has one.';
comment on column metric.name is 'In scope evaluation: see v_metrics; depth-2/... is the number of difficulty class 2, world-sciworld/... that of one of several worlds.';

create table event (
    event_id varchar primary key,
    run_id varchar not null,
    iteration_id varchar,
    stage varchar not null,
    level varchar not null,
    class varchar not null,
    phase varchar not null,
    subject varchar not null,
    message varchar not null,
    traceback varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table event is 'Something that happened on the way: an error in an episode, a retry, a warning.';
comment on column event.class is 'Class of the exception.';
comment on column event.phase is 'What was being done: generate, parse, step, restore and so on.';
comment on column event.subject is 'Id or key of what it happened to.';

create table selection (
    iteration_id varchar not null,
    instance_id varchar not null,
    episodes integer not null,
    correctness double not null,
    cost double not null,
    s_corr double,
    s_tool double,
    front integer,
    crowding double,
    selected boolean not null,
    reason varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, instance_id)
);
comment on table selection is 'An instance of which a stage of the curriculum has rollouts, and whether it is trained on.';
comment on column selection.episodes is 'Rollouts that were played.';
comment on column selection.correctness is 'Their mean reward.';
comment on column selection.cost is 'Their mean number of tool calls, or of steps where `et_agent.curriculum.counts` says so.';
comment on column selection.s_corr is 'Standard deviation of the reward over the rollouts; null where some are missing.';
comment on column selection.s_tool is 'That of the number of calls, or steps.';
comment on column selection.front is 'The front of the Pareto order, from 0; null where a filter came before it; 0 of all that could be drawn at random.';
comment on column selection.crowding is 'Crowding distance within the front; infinite at its ends.';
comment on column selection.reason is 'chosen; incomplete: rollouts failed for good; alike: all right or all wrong; crowded: in the front that was cut, too close to others; dominated: in a front after it; not-drawn: others were drawn at random.';

create table rl_step (
    iteration_id varchar not null,
    step integer not null,
    reward double not null,
    pass_at_1 double not null,
    pass_at_n double not null,
    mixed_share double not null,
    drawn_again integer not null,
    episode_tokens double not null,
    episode_steps double not null,
    cut_share double,
    loss double,
    entropy double,
    kl double,
    sampler_kl double,
    clip_share double,
    grad_norm double,
    learning_rate double,
    sampled_tokens bigint not null,
    trained_tokens bigint not null,
    sampling_seconds double,
    training_seconds double,
    shaped double,
    recovered double,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, step)
);
comment on table rl_step is 'One step of reinforcement learning: groups are sampled, and those with contrast are trained on.';
comment on column rl_step.step is 'From 1.';
comment on column rl_step.reward is 'Mean reward of the episodes of the step.';
comment on column rl_step.pass_at_1 is 'Share of successful episodes.';
comment on column rl_step.pass_at_n is 'Share of groups with a successful episode.';
comment on column rl_step.mixed_share is 'Share of groups with contrast, of those that were drawn.';
comment on column rl_step.drawn_again is 'Groups drawn in place of such without contrast.';
comment on column rl_step.episode_tokens is 'Mean sampled tokens of an episode, those that it was given not counted.';
comment on column rl_step.cut_share is 'Share of replies that their token limit cut; null in an iteration that another program trained.';
comment on column rl_step.loss is 'Mean over the updates; null, as what follows, where no group had contrast.';
comment on column rl_step.entropy is 'Mean entropy of the policy at a trained token, in nats.';
comment on column rl_step.kl is 'Mean divergence from the model that the iteration starts from, in nats a token; null where the loss has none.';
comment on column rl_step.sampler_kl is 'Mean divergence from the policy that sampled, in nats a token.';
comment on column rl_step.clip_share is 'Share of trained tokens whose ratio was clipped.';
comment on column rl_step.grad_norm is 'Mean norm of the gradient before it is clipped.';
comment on column rl_step.learning_rate is 'Null in an iteration that another program trained.';
comment on column rl_step.sampling_seconds is 'Null where its episodes were in the store already.';
comment on column rl_step.training_seconds is 'Null in an iteration that another program trained.';
comment on column rl_step.shaped is 'Mean of what the episodes of the step are worth to the training; null where that is their reward.';
comment on column rl_step.recovered is 'Share of the episodes that went on from a failed one and succeeded; null where none did. The shares and means beside it are of those that began at the start.';

create table rl_group (
    iteration_id varchar not null,
    step integer not null,
    number integer not null,
    instance_id varchar not null,
    policy varchar not null,
    draw integer not null,
    episodes integer not null,
    reward double not null,
    wins integer not null,
    contrast boolean not null,
    prefix integer default 0,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (iteration_id, step, number)
);
comment on table rl_group is 'The episodes of one instance in a step of reinforcement learning.';
comment on column rl_group.policy is 'The policy that sampled: the checkpoint in the making and the steps that it had been trained.';
comment on column rl_group.draw is 'Times that groups without contrast had been drawn again when this one was drawn.';
comment on column rl_group.reward is 'Mean reward.';
comment on column rl_group.contrast is 'Whether what its episodes are worth differs; only such groups are trained on.';
comment on column rl_group.prefix is 'Steps that its episodes were given: the beginning of a failed episode or of the expert''s, which derivation names; they are not trained. 0: they begin at the start.';

create table rl_rollout (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    step integer not null,
    number integer not null,
    episode integer not null,
    advantage double not null,
    shaped double,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table rl_rollout is 'An episode of a group, and its advantage over the others.';
comment on column rl_rollout.number is 'That of its group.';
comment on column rl_rollout.shaped is 'What the episode is worth to the training, from which its advantage comes; null where that is the reward of its trajectory.';

create table rl_validation (
    trajectory_id varchar primary key,
    iteration_id varchar not null,
    step integer not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table rl_validation is 'An episode of the development set that the policy played greedily after a step; all of a validation are stored at once.';

create table rl_credit (
    trajectory_id varchar not null,
    position integer not null,
    advantage double not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (trajectory_id, position)
);
comment on table rl_credit is 'The advantage of a step of a rollout, where steps have their own (`grpo.credit: siblings`); else it is that of rl_rollout.';
comment on column rl_credit.position is 'That of the step.';

create table timing (
    timing_id varchar primary key,
    iteration_id varchar not null,
    stage varchar not null,
    part varchar not null check (part in ('generate', 'environment', 'train', 'store', 'other')),
    seconds double not null,
    tokens bigint,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table timing is 'Where the time of a stage went; a stage that was resumed has a row for each attempt and part.';
