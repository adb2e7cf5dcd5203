-- Joins orders with their payments, up to a day apart.
SET 'execution.checkpointing.interval' = '1 s';
CREATE TABLE orders (
  id STRING, shop STRING, cents BIGINT, placed TIMESTAMP_LTZ(3), WATERMARK FOR placed AS placed - INTERVAL '1' HOUR)
WITH (
  'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601');
CREATE TABLE payments (
  id STRING, paid BIGINT, paid_at TIMESTAMP_LTZ(3), WATERMARK FOR paid_at AS paid_at - INTERVAL '1' HOUR) WITH (
  'connector' = 'kafka', 'topic' = 'payments', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601');
CREATE TABLE paid (id STRING, shop STRING, cents BIGINT, paid BIGINT) WITH (
  'connector' = 'kafka', 'topic' = 'paid', 'properties.bootstrap.servers' = 'broker:9092',
  'key.format' = 'raw', 'key.fields' = 'id', 'value.format' = 'json',
  'sink.delivery-guarantee' = 'exactly-once', 'sink.transactional-id-prefix' = 'paid',
  'properties.transaction.timeout.ms' = '600000');
INSERT INTO paid
SELECT o.id, o.shop, o.cents, p.paid FROM orders AS o JOIN payments AS p
ON o.id = p.id AND p.paid_at BETWEEN o.placed - INTERVAL '1' DAY AND o.placed + INTERVAL '1' DAY;
