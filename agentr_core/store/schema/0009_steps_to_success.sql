-- What comments of earlier migrations said too little or wrongly.
comment on column sample.trajectory_id is 'The stored episode behind the sample: a path of a tree, an episode of the expert or of the policy; null where there is none, as for splices of all modes but `continued`.';
