-- Ids are 16 hexadecimal digits of a content hash unless said otherwise; all times are UTC.
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

create table iteration (
    iteration_id varchar primary key,
    run_id varchar not null,
    iteration integer not null,
    checkpoint_in varchar,
    checkpoint_out varchar,
    status varchar not null,
    finished_at timestamp,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table iteration is 'One turn of the wheel of a run.';
comment on column iteration.iteration is 'Counts from 1; 0 is the evaluation of the model the run starts from.';
comment on column iteration.checkpoint_out is 'The policy that was trained, once it is.';

create table instance (
    instance_id varchar primary key,
    environment varchar not null,
    split varchar not null,
    instance_index bigint not null,
    depth integer,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table instance is 'One problem of an environment.';
comment on column instance.instance_id is 'environment/split/index.';
comment on column instance.depth is 'Difficulty class, where the environment has one.';

create table text (
    text_id varchar primary key,
    text varchar not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table text is 'Every long text once: observations, replies, prompts. The columns that end in _id of other tables point here.';

create table tree (
    tree_id varchar primary key,
    iteration_id varchar not null,
    instance_id varchar not null,
    checkpoint_id varchar not null,
    seed bigint not null,
    config json not null,
    first_observation_id varchar not null,
    dives_done integer not null,
    finished boolean not null,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table tree is 'One search tree, finished or half grown.';
comment on column tree.checkpoint_id is 'The policy that searched.';
comment on column tree.config is 'Settings of the search.';
comment on column tree.dives_done is 'Completed dives.';

create table node (
    tree_id varchar not null,
    node_index integer not null,
    parent integer not null,
    depth integer not null,
    reply_id varchar,
    action varchar,
    observation_id varchar,
    reward double,
    terminated boolean,
    success boolean,
    disaster boolean,
    visits integer not null,
    value_sum double not null,
    terminal boolean not null,
    stop varchar,
    dive integer not null,
    duplicates integer not null,
    draw integer,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table node is 'A step in a search tree, or its root (index 0, parent -1, no step). v_nodes shows the texts.';
comment on column node.reward is 'Reward after the step, in [0, 1].';
comment on column node.visits is 'Backed-up rewards; value_sum / visits is the value of the node.';
comment on column node.terminal is 'No further expansion is possible here.';
comment on column node.stop is 'Why the path ended here, on nodes where one did.';
comment on column node.dive is 'The dive that made the node.';
comment on column node.duplicates is 'Sampled replies this node stands for, after equal siblings were merged.';
comment on column node.draw is 'The generation the node is made of.';

create table generation (
    kind varchar not null check (kind in ('node', 'step', 'judgement')),
    owner_id varchar not null,
    position integer not null,
    draw integer not null,
    reply_id varchar not null,
    token_ids integer[] not null,
    logprobs double[],
    seed bigint,
    finish_reason varchar,
    prompt_tokens integer,
    completion_tokens integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (kind, owner_id, position, draw)
);
comment on table generation is 'What the sampler produced for one reply, also for replies that were merged into an equal one.';
comment on column generation.kind is 'node, step or judgement: the table that owns the reply.';
comment on column generation.owner_id is 'tree_id of a node or a judgement, trajectory_id of a step.';
comment on column generation.position is 'node_index of a node or a judgement, position of a step.';
comment on column generation.draw is 'Number of the reply within its request; -1 where only its tokens are known.';
comment on column generation.seed is 'Seed of the request.';
comment on column generation.logprobs is 'Natural-log probability of each token, where they were asked for.';

create table judgement (
    tree_id varchar not null,
    node_index integer not null,
    iteration_id varchar not null,
    verdict varchar not null,
    votes varchar[] not null,
    dropped_steps integer not null,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (tree_id, node_index)
);
comment on table judgement is 'The word of the judge on one node; its replies are generations.';
comment on column judgement.votes is 'The verdict of each reply, in the order of the draws.';
comment on column judgement.dropped_steps is 'Oldest steps left out of the prompt to make it fit.';

create table trajectory (
    trajectory_id varchar primary key,
    source varchar not null check (source in ('tree', 'rollout', 'episode', 'splice', 'expert')),
    iteration_id varchar,
    evaluation_id varchar,
    instance_id varchar not null,
    first_observation_id varchar not null,
    reward double not null,
    success boolean not null,
    stop varchar not null,
    num_steps integer not null,
    tree_id varchar,
    leaf integer,
    created_at timestamp not null default (now() at time zone 'UTC')
);

create table step (
    trajectory_id varchar not null,
    position integer not null,
    reply_id varchar not null,
    action varchar not null,
    observation_id varchar not null,
    reward double not null,
    terminated boolean not null,
    success boolean not null,
    disaster boolean not null,
    draw integer,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (trajectory_id, position)
);
comment on table step is 'One reply of the model in a trajectory and what it led to; position counts from 0.';
comment on column step.draw is 'The generation the step is made of.';

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
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table pair is 'A good and a bad path of one tree.';
comment on column pair.good_leaf is 'node_index of the last node of the good path.';
comment on column pair.shared_steps is 'Steps both paths have in common from the root.';
comment on column pair.gap is 'good_reward - bad_reward.';

create table critique (
    pair_id varchar primary key,
    iteration_id varchar not null,
    first_error integer,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table critique is 'The finished judgement of the bad path of a pair.';
comment on column critique.first_error is 'Position of the first bad step, counted from 0 at the root; null when none is bad.';

create table verdict (
    pair_id varchar not null,
    position integer not null,
    verdict varchar not null,
    reply_id varchar not null,
    node_index integer,
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (pair_id, position)
);
comment on table verdict is 'The word of the judge on one step of the bad path of a pair: good, bad, uncertain or unparsable.';
comment on column verdict.node_index is 'The judged node in the tree of the pair.';

create table sample (
    sample_id varchar primary key,
    iteration_id varchar not null,
    kind varchar not null,
    instance_id varchar,
    pair_id varchar,
    trajectory_id varchar,
    tree_id varchar,
    good_leaf integer,
    bad_leaf integer,
    shared_steps integer,
    cut integer,
    good_reward double,
    bad_reward double,
    extra json not null,
    num_tokens integer,
    num_trained_tokens integer,
    created_at timestamp not null default (now() at time zone 'UTC')
);
comment on table sample is 'A conversation to train on. v_samples shows its messages.';
comment on column sample.cut is 'Steps of the bad path that were kept, first error included.';

create table message (
    sample_id varchar not null,
    position integer not null,
    role varchar not null,
    text_id varchar not null,
    train boolean not null,
    token_ids integer[],
    created_at timestamp not null default (now() at time zone 'UTC'),
    primary key (sample_id, position)
);
comment on table message is 'One turn of a sample.';
comment on column message.train is 'Whether the tokens of the turn carry loss.';
comment on column message.token_ids is 'The tokens as they were sampled; null for a turn that was not sampled.';

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
comment on column checkpoint.config is 'Settings of the training.';

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
