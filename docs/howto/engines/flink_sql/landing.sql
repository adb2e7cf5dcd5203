-- Writes each record of a topic as a row of a table, whose key recognises a repeated record.
SET 'execution.checkpointing.interval' = '1 s';
CREATE TABLE orders (
  id STRING, shop STRING, cents BIGINT, placed TIMESTAMP_LTZ(3),
  kafka_partition INT METADATA FROM 'partition' VIRTUAL, kafka_offset BIGINT METADATA FROM 'offset' VIRTUAL) WITH (
  'connector' = 'kafka', 'topic' = 'orders', 'properties.bootstrap.servers' = 'broker:9092',
  'scan.startup.mode' = 'earliest-offset', 'format' = 'json', 'json.timestamp-format.standard' = 'ISO-8601');
CREATE TABLE landed (
  id STRING, shop STRING, cents BIGINT, placed TIMESTAMP(3), kafka_partition INT, kafka_offset BIGINT,
  PRIMARY KEY (kafka_partition, kafka_offset) NOT ENFORCED) WITH (
  'connector' = 'jdbc', 'url' = 'jdbc:postgresql://database/shop', 'table-name' = 'orders',
  'username' = 'user', 'password' = 'password');
INSERT INTO landed SELECT * FROM orders;
