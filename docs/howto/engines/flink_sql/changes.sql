-- Follows the changes of a table, as Debezium writes them, in a table of another database.
SET 'execution.checkpointing.interval' = '1 s';
CREATE TABLE changes (id BIGINT, shop STRING, cents BIGINT) WITH (
  'connector' = 'kafka', 'topic' = 'shop.public.orders', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'debezium-json', 'debezium-json.schema-include' = 'true');
CREATE TABLE orders (id BIGINT PRIMARY KEY NOT ENFORCED, shop STRING, cents BIGINT) WITH (
  'connector' = 'jdbc', 'url' = 'jdbc:postgresql://database/shop', 'table-name' = 'orders',
  'username' = 'user', 'password' = 'password');
INSERT INTO orders SELECT * FROM changes;
