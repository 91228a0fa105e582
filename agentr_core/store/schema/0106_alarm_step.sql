-- Steps are whole numbers of 64 bits, as in all tables of records.

alter table alarm alter column step type bigint;
