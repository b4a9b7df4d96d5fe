"""The books: the accounting of many jobs in one database.

Each broker writes a journal of its own, and the folder of a job may be removed one day. The package
folds journals into rows (`importing`), defines their tables (`schema`) and reads them again
(`query`, `stored_record`). The default database is an SQLite file below TANGRAM_HOME; a site may
name a PostgreSQL or MariaDB. Only `tangram books` and `acct --books` import this package, as it
loads SQLAlchemy. Unlike the rest of `accounting` it reads journals, and so stands to the right of
`storage`; clocks are handed in.
"""
