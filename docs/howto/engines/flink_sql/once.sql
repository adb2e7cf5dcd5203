-- Drops the orders that repeat one of the day before.
SET 'execution.checkpointing.interval' = '1 s';
SET 'table.exec.state.ttl' = '1 d';
CREATE TABLE orders (
  id STRING, shop STRING, cents BIGINT, placed TIMESTAMP_LTZ(3), WATERMARK FOR placed AS placed - INTERVAL '1' HOUR)
WITH (
  'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601');
CREATE TABLE orders_once (id STRING, shop STRING, cents BIGINT, placed TIMESTAMP_LTZ(3)) WITH (
  'connector' = 'kafka', 'topic' = 'orders_once', 'properties.bootstrap.servers' = 'broker:9092',
  'key.format' = 'raw', 'key.fields' = 'id', 'value.format' = 'json',
  'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = 'orders-once',
  'properties.transaction.timeout.ms' = '600000');
INSERT INTO orders_once SELECT id, shop, cents, placed FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY id ORDER BY placed) AS place FROM orders) WHERE place = 1;
