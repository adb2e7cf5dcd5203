-- Counts the words of a topic, in a table.
SET 'execution.checkpointing.interval' = '1 s';
CREATE TABLE lines (line STRING) WITH (
  'connector' = 'kafka', 'topic' = 'lines', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'raw');
CREATE TABLE counts (word STRING PRIMARY KEY NOT ENFORCED, n BIGINT) WITH (
  'connector' = 'jdbc', 'url' = 'jdbc:postgresql://database/shop', 'table-name' = 'counts',
  'username' = 'user', 'password' = 'password');
INSERT INTO counts
SELECT word, COUNT(*) FROM lines, UNNEST(SPLIT(LOWER(line), ' ')) AS each_of (word) GROUP BY word;
