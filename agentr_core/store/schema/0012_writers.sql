-- Who grows a tree.

alter table tree add column writer varchar;
comment on column tree.writer is 'The process that grows the tree, or grew it last; rows of another are refused. Null: from before there was such a mark.';
